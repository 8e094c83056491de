"""The command of a supervise that was killed: it runs on without us, and must be gone before the next one starts."""

from __future__ import annotations

import os
import signal

from ckptguard.records.who_and_when import this_host
from ckptguard.supervise.command import Wait, end_all, until
from ckptguard.supervise.lock_file import MARK, Note
from ckptguard.supervise.process_tree import Process, ancestors, descendants, find, marked, send_signal


def left_running(note: Note) -> list[Process]:
    """What a killed supervise left running, in whatever session and whoever's child it is now: the command, all that
    bears its mark, and what is below those. Never ourselves, nor what started us or was started by us."""
    if note.boot_id != this_host()[1]:
        return []
    command = find(*note.command) if note.command is not None else None
    roots = {p.pid: p for p in (*([command] if command else ()), *marked(MARK, note.mark))}
    found = {**roots, **{p.pid: p for p in descendants(*roots)}}
    ours = {os.getpid(), *ancestors(os.getpid()), *(p.pid for p in descendants(os.getpid()))}
    return [process for pid, process in found.items() if pid not in ours]


def end_left_running(note: Note, seconds: float, wait: Wait) -> bool:
    """Ask the command to end, then what it leaves, each within `seconds`; then kill. False if something survives."""
    command = find(*note.command) if note.command is not None else None
    if command is not None and command.pid in [p.pid for p in left_running(note)]:
        send_signal(command, signal.SIGTERM)
        until(lambda: find(command.pid, command.started) is None, seconds, wait)
    return end_all(lambda: left_running(note), seconds, wait)
