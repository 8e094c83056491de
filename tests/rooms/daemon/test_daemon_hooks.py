"""Hooks: each event reaches the command and the webhook once, and nothing they do harms the daemon."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptguard_daemon.log import log
from support.daemon_process import PATIENCE, Starter, save, until
from support.faults import flip
from support.hook_commands import TELL, command, told, toml
from support.http_documents import assert_like, example
from support.web_listener import Listener, listening

from ckptguard.reporting import channels
from ckptguard.reporting.notify import Hooks
from ckptguard.values.settings import Settings


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A web server that listens to one webhook."""
    with listening() as found:
        yield found


def test_each_event_is_told_once_also_across_restarts(
    run: Path, start: Starter, tmp_path: Path, listener: Listener
) -> None:
    """Bad, suspect and incomplete verdicts and reported incidents are told; good ones are not; nothing twice."""
    path = tmp_path / "told"
    arguments = toml(tmp_path, on_incident=command(path), webhook=listener.url)
    save(run, 100)
    save(run, 200, nan=True)
    first = start(run, arguments=arguments)
    first.outcome(200)
    first.post("incidents", {"reason": "the loss is NaN", "step": 212})
    until(lambda: len(told(path)) == 2 and len(listener.posted) == 2, "two events")
    assert first.stop() == 0
    second = start(run, arguments=arguments)
    second.known_good(100)
    # Damage afterwards is news; it also shows that everything before it has been told by now.
    flip(run / "net-100.safetensors")
    second.post("verify", {"path": "net-100.safetensors"})
    until(lambda: len(told(path)) == 3 and len(listener.posted) == 3, "the third event")
    events = sorted((e["event"], e["step"], e["cause"]) for e in told(path))
    assert events == [("incident", 212, "numeric"), ("verdict", 100, "bad"), ("verdict", 200, "bad")]
    assert sorted(map(json.dumps, listener.posted)) == sorted(map(json.dumps, told(path)))


def test_what_hooks_are_told_is_documented(run: Path, start: Starter, tmp_path: Path) -> None:
    """The document has the keys and types of the example."""
    path = tmp_path / "told"
    save(run, 200, nan=True)
    daemon = start(run, arguments=toml(tmp_path, on_incident=command(path)), CKPTGUARD_TEAM="vision")
    daemon.post("incidents", {"reason": "NaN"})
    until(lambda: len(told(path)) == 2, "two events")
    for event in told(path):
        assert_like({**event, "incident": None}, example("hook"))
    bad = next(e for e in told(path) if e["event"] == "verdict")
    assert bad["findings"][0]["tensor"] == "model.w"


def test_kill_9_before_the_telling_loses_nothing(run: Path, start: Starter, tmp_path: Path) -> None:
    """A daemon that is killed while it tells is made up for by the next, and by that one only."""
    path, started = tmp_path / "told", tmp_path / "started"
    hangs = f"import pathlib, time; p = pathlib.Path({str(started)!r}); p.exists() or (p.touch(), time.sleep(1000))"
    arguments = toml(tmp_path, on_incident=[sys.executable, "-c", f"{hangs}\n{TELL.format(path=str(path))}"])
    save(run, 100)
    first = start(run, arguments=arguments)
    first.known_good(100)
    save(run, 200, nan=True)
    until(started.exists, "the command's start")
    first.kill()
    for _ in range(2):
        second = start(run, arguments=arguments)
        second.outcome(200)
        until(lambda: path.exists() and len(told(path)) == 1, "the event")
        assert second.stop() == 0
    assert [(e["step"], e["cause"], e["source"]) for e in told(path)] == [(200, "bad", "records")]


def test_once_tells_before_it_ends(run: Path, start: Starter, tmp_path: Path) -> None:
    """`--once` waits for its hooks."""
    save(run, 200, nan=True)
    daemon = start(run, arguments=("--once", *toml(tmp_path, on_incident=command(tmp_path / "told"))))
    assert daemon.process.wait(PATIENCE) == 3
    assert [e["step"] for e in told(tmp_path / "told")] == [200]


def test_a_slow_command_does_not_stop_the_loop(run: Path, start: Starter, tmp_path: Path) -> None:
    """While a command hangs, verdicts go on; a stop ends it with its children and takes no longer."""
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); os.system('sleep 1000')"
    save(run, 100, nan=True)
    daemon = start(run, arguments=toml(tmp_path, on_incident=[sys.executable, "-c", code]))
    until(lambda: pid.exists() and pid.read_text(), "the command's start")
    save(run, 200)
    daemon.known_good(200)
    group = int(pid.read_text())
    assert daemon.stop() == 0
    until(lambda: not _group_lives(group), "the end of the command and its children")


def test_a_command_past_its_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command gets its seconds, then it is killed and the next event has its turn."""
    lines: list[tuple[str, object]] = []

    def log(event: str, /, **fields: object) -> None:
        lines.append((event, fields.get("exit_code")))

    monkeypatch.setattr(channels, "COMMAND_SECONDS", 0.3)
    telling = Hooks(Settings(on_incident=("sleep", "1000")), log)
    telling.tell(None, {"step": 1})
    telling.tell(None, {"step": 2})
    telling.close(timeout=PATIENCE)
    assert lines == [("hook_ran", -signal.SIGKILL)] * 2


def test_a_command_that_is_not_there_is_a_log_line(tmp_path: Path) -> None:
    """A missing or failing command is told about and harms nothing; no shell reads its words."""
    lines: list[tuple[str, dict[str, object]]] = []

    def log(event: str, /, **fields: object) -> None:
        lines.append((event, fields))

    for argv in ((str(tmp_path / "missing"),), ("/bin/false",), ("/bin/echo", f"x; touch {tmp_path}/y")):
        telling = Hooks(Settings(on_incident=argv), log)
        telling.tell(None, {"step": 1})
        telling.close(timeout=PATIENCE)
    assert [event for event, _ in lines] == ["hook_failed", "hook_ran", "hook_ran"]
    assert lines[1][1]["exit_code"] == 1
    assert list(tmp_path.iterdir()) == []


def _group_lives(group: int) -> bool:
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


def test_nothing_of_a_hook_is_left_open(tmp_path: Path) -> None:
    """Telling many events leaves no descriptor behind."""
    before = len(os.listdir("/proc/self/fd"))
    telling = Hooks(Settings(on_incident=command(tmp_path / "told")), log)
    for step in range(5):
        telling.tell(None, {"step": step})
    telling.close(timeout=PATIENCE)
    assert [e["step"] for e in told(tmp_path / "told")] == [0, 1, 2, 3, 4]
    assert len(os.listdir("/proc/self/fd")) == before
    assert stat.S_ISREG((tmp_path / "told").stat().st_mode)
