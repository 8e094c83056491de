"""The lock of a run's supervise process on this machine: a note beside the daemon's sockets, and its use after a kill.

The kernel frees the lock when its holder ends in any way. An orderly end also removes the note. So a note found by the
next holder comes from a killed supervise. The note is not in the records, because process ids mean
nothing on other machines. A folder of ours in a run without saves would also keep some trainers from starting.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from ckptguard.errors import BusyError, CkptguardError
from ckptguard.records.who_and_when import this_host
from ckptguard.storage import normalise_url
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.supervise.command import Wait, end_all, until
from ckptguard.supervise.process_tree import Process, ancestors, descendants, find, marked, send_signal, started_at
from ckptguard.values.ids import run_id_of

MARK = "CKPTGUARD_SUPERVISED"  # in the environment of the command and of all that it starts
_MOST = 1 << 20  # bytes of a note


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What the next supervise must know. `command` is (pid, start time) of the running command, `argv` a digest of its
    command line. `series` had saves in place. `targets` maps folders to the steps that they last went back to."""

    boot_id: str
    pid: int
    mark: str
    argv: str
    command: tuple[int, int] | None = None
    restarts: int = 0
    series: tuple[str, ...] = ()
    targets: dict[str, int] = {}


class Supervision:
    """Holds the lock on a run from `begin` to `end`, and keeps the note."""

    def __init__(self, descriptor: int, path: str, note: Note) -> None:
        self._descriptor, self._path, self._note = descriptor, path, note
        self.mark = note.mark  # of the processes of this supervise's command

    @classmethod
    def begin(
        cls, url: str, argv: Sequence[str], environ: Mapping[str, str], rank: int = 0
    ) -> tuple[Self, Note | None]:
        """Take the lock of this rank, and return the note of a killed supervise of this run, if there is one.

        Raises:
            BusyError: another supervise runs for this run.
            OSError: notes cannot be kept here.
        """
        path = _place(url, environ) + (f"-{rank}" if rank else "")
        descriptor = _locked(path, url)
        left = _parse(os.pread(descriptor, _MOST, 0))
        command = hashlib.sha256("\0".join(argv).encode("utf-8", "surrogateescape")).hexdigest()
        mine = Note(boot_id=this_host()[1], pid=os.getpid(), mark=uuid.uuid4().hex, argv=command)
        if left is not None and left.argv != command:
            left = msgspec.structs.replace(left, restarts=0)  # another command line has its own budget
        return cls(descriptor, path, mine), left

    def note(self, **changes: object) -> None:
        """Change the note. Never raises: without a note, only recovery after a kill is harder."""
        self._note = msgspec.structs.replace(self._note, **changes)
        text = msgspec.json.encode(self._note) + b"\n"
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))

    def end(self) -> None:
        """End in order: nothing is left to recover."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # before the lock is freed: the next one checks that it has the right file
        os.close(self._descriptor)


def is_supervised(url: str, environ: Mapping[str, str]) -> bool:
    """Whether a supervise of this user looks after the run, by its note. The lock is left alone: somebody may want it
    at this moment."""
    try:
        with open(_place(url, environ), "rb") as file:
            note = _parse(file.read(_MOST))
    except (OSError, CkptguardError):
        return False
    boot_id = this_host()[1]
    return note is not None and note.boot_id == boot_id and started_at(note.pid) != 0


def _place(url: str, environ: Mapping[str, str]) -> str:
    return os.path.join(private_runtime_folder(environ), f"supervise-{run_id_of(normalise_url(url))}")


def _locked(path: str, url: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BlockingIOError:
            holder = _parse(os.pread(descriptor, _MOST, 0))
            who = f" (process {holder.pid})" if holder is not None else ""
            os.close(descriptor)
            raise BusyError(f"another supervise{who} is already running for {url}") from None
        os.close(descriptor)  # the previous holder removed it


def _parse(text: bytes) -> Note | None:
    try:
        return msgspec.json.decode(text.partition(b"\n")[0], type=Note)
    except msgspec.MsgspecError:
        return None


def left_running(note: Note) -> list[Process]:
    """Return what a killed supervise left running, in any session and under any parent.

    That is the command, everything with its mark, and all processes below those. Our own process, our parents and our
    children are never included.
    """
    if note.boot_id != this_host()[1]:
        return []
    command = find(*note.command) if note.command is not None else None
    roots = {p.pid: p for p in (*([command] if command else ()), *marked(MARK, note.mark))}
    found = {**roots, **{p.pid: p for p in descendants(*roots)}}
    ours = {os.getpid(), *ancestors(os.getpid()), *(p.pid for p in descendants(os.getpid()))}
    return [process for pid, process in found.items() if pid not in ours]


def end_left_running(note: Note, seconds: float, wait: Wait) -> bool:
    """Ask the command to end, then what it leaves, each within `seconds`; then kill them. False if one survives."""
    command = find(*note.command) if note.command is not None else None
    if command is not None and command.pid in [p.pid for p in left_running(note)]:
        send_signal(command, signal.SIGTERM)
        until(lambda: find(command.pid, command.started) is None, seconds, wait)
    return end_all(lambda: left_running(note), seconds, wait)
