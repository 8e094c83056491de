"""A supervised run beside a daemon: one of the two makes the passes. And changes wake it, no timer."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon_process import until
from support.runs import QUICK, write_torch
from support.supervised_runs import save_watch
from support.trainer_saves import save

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.records.daemon_record import DaemonRecord, write_daemon_record
from ckptguard.records.run import open_run
from ckptguard.records.who_and_when import this_host, utc_now
from ckptguard.reporting.notify import Hooks
from ckptguard.runs.work import PLAIN
from ckptguard.scan import scan_files
from ckptguard.values.ids import run_id_of


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[socket.socket]:
    """What takes connections where a daemon would."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path_factory.mktemp("s") / "d"))
        listening.listen()
        yield listening


def guarded_by(run: Path, daemon: socket.socket, *, daemon_timeout: float) -> WatchedRun:
    """A run with one good save, which the daemon guards on record, as supervise watches it."""
    write_torch(run, 1, seed=1)
    host, boot_id = this_host()
    address = daemon.getsockname()
    record = DaemonRecord(address=address, host=host, boot_id=boot_id, pid=os.getpid(), started_at=utc_now())
    write_daemon_record(open_run(str(run)), record)
    hooks = Hooks(QUICK, lambda *_, **__: None)
    watched = WatchedRun(str(run), run_id_of(str(run)), QUICK, hooks, None, source="supervise", caller_acts=True)
    watched.yields, watched.daemon_timeout = True, daemon_timeout
    return watched


def test_verdicts_are_left_to_a_daemon_that_answers(tmp_path: Path, daemon: socket.socket) -> None:
    """Nothing is read twice, and nothing is written."""
    watched = guarded_by(tmp_path / "run", daemon, daemon_timeout=3600.0)
    for _ in range(2):
        done = watched.step(PLAIN)
        assert done is not None
        assert done.checked == ()
        assert [waiting.path for waiting in done.pending] == ["net-1.pt"]
    assert not list(tmp_path.glob("run/_ckptguard/ledger/*/*"))
    quiet = watched.step(PLAIN, assume_quiet=True)
    assert quiet is not None
    assert [one.path for one in quiet.checked] == ["net-1.pt"], "after the end of the command nobody else is waited for"


def test_a_daemon_that_does_not_answer_is_not_waited_for(tmp_path: Path, daemon: socket.socket) -> None:
    """It may have ended on another machine or in another container: its record alone protects nothing."""
    watched = guarded_by(tmp_path / "run", daemon, daemon_timeout=3600.0)
    daemon.close()
    done = watched.step(PLAIN)
    assert done is not None
    assert [one.path for one in done.checked] == ["net-1.pt"]


def test_a_save_that_waits_too_long_is_verified_here(tmp_path: Path, daemon: socket.socket) -> None:
    """A daemon may hang, or have many other runs."""
    watched = guarded_by(tmp_path / "run", daemon, daemon_timeout=0.0)
    watched.step(PLAIN)  # sees it for the first time
    done = watched.step(PLAIN)
    assert done is not None
    assert [one.path for one in done.checked] == ["net-1.pt"]


def test_a_sick_save_is_seen_by_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer is due for an hour, and yet the watch ends with the sick save."""
    monkeypatch.setattr("ckptguard.engine.watcher._is_own_disk", lambda path: True)
    run = tmp_path / "run"
    save(run / "ckpt.pt", 1)
    watch = save_watch(str(run), QUICK.changed(scan_interval=3600.0, keep="copy"), scan_files)
    watch.prepare()
    watch.begin()
    assert watch.last_look() == []
    found: list[str] = []
    passes = watch._run.passes
    ended = threading.Event()

    def watches() -> None:
        found.extend(one.path for one in watch.watch(threading.Event()))
        ended.set()

    threading.Thread(target=watches, daemon=True).start()
    until(lambda: watch._run.passes > passes, "its first pass")
    save(run / "ckpt.pt", 2, sick=True)
    assert ended.wait(100)
    assert found == ["ckpt.pt"]
