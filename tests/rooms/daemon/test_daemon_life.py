"""The daemon as a process: it starts, guards, is killed, comes back, and stops cleanly."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import fsspec
import pytest
from ckptguard_daemon.liveness import TimeLimit
from ckptguard_daemon.once import run_once
from ckptguard_daemon.plan import DaemonPlan, ListenOptions
from support.daemon_process import PATIENCE, DaemonProcess, Starter, once, save, until, was_asked
from support.faults import flip
from support.views import look

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.inspect.list_states import survey
from ckptguard.records.daemon_record import read_daemon_record
from ckptguard.records.kept import read_kept
from ckptguard.records.run import open_run
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.training.client import is_alive
from ckptguard.values.ids import CheckpointId, run_id_of
from ckptguard.values.settings import Settings


def test_damage_is_found_when_asked_for(run: Path, start: Starter) -> None:
    """`POST verify` with a path reads that checkpoint again, even if storage reports no change."""
    save(run, 100)
    path = save(run, 200)
    daemon = start(run)
    daemon.known_good(200)
    opened, id = open_run(str(run)), CheckpointId("net-#.safetensors", 200, 1)
    until(lambda: (kept := read_kept(opened, id)) and kept.how != "link", "bytes of its own for the kept copy")
    flip(path)
    assert daemon.post("verify", {"path": "net-200.safetensors"})[0] == 202
    daemon.logged("verified", id="200.1", outcome="bad")
    answer = daemon.known_good(200)  # its kept copy has bytes of its own
    assert (answer["id"], answer["kept"]) == ("200.1", True)


def test_a_run_that_comes_later_is_waited_for(tmp_path: Path, start: Starter) -> None:
    """A daemon may be started before its run exists, and makes nothing meanwhile."""
    run = tmp_path / "later"
    daemon = start(run)
    daemon.logged("waiting")
    assert daemon.ask("known-good")[0] == 404
    assert not run.exists()
    run.mkdir()
    save(run, 1)
    daemon.known_good(1)


def test_kill_and_restart_loses_nothing(run: Path, start: Starter) -> None:
    """Killed in the middle of a scan, the daemon takes its worker along; the next one gives the verdict."""
    save(run, 100)
    first = start(run)
    first.known_good(100)
    worker = first.child()
    os.kill(worker, signal.SIGSTOP)
    save(run, 200)
    until(lambda: was_asked(worker), "a question to the worker")
    first.kill()
    until(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end")
    assert not any("200" in p.name for p in (run / "_ckptguard" / "ledger").rglob("*.json"))
    second = start(run)
    assert second.address == first.address
    assert second.known_good(200)["id"] == "200.1"
    assert {c["id"]: c["outcome"] for c in second.ask("checkpoints")[1]["checkpoints"]} == {
        "100.1": "good",
        "200.1": "good",
    }


def test_from_the_start_to_a_clean_stop(run: Path, start: Starter) -> None:
    """Saves before and after the start get verdicts. The socket is private, the process needs less than 80 MiB, and no
    name breaks a line of the log. SIGTERM ends it with 0: its socket, its record and its worker are gone."""
    save(run, 100)
    daemon = start(run)
    assert daemon.known_good(100)["path"] == str(run / "net-100.safetensors")
    save(run, 200)
    assert daemon.known_good(200)["id"] == "200.1"
    save(run, 300, nan=True)
    assert daemon.outcome(300) == "bad"
    assert daemon.known_good(200)["pending"] == []
    save(run, 400).rename(run / "net-400\n\x1b[31m.safetensors")
    line = daemon.logged("verified", id="400-31000000.1")
    assert (list(line)[:3], line["path"]) == (["time", "level", "event"], "net-400\\u000a\\u001b[31m.safetensors")
    worker, place = daemon.child(), Path(daemon.address)
    assert stat.S_IMODE(place.lstat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.lstat().st_mode) == 0o700
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 80 * 1024
    record = read_daemon_record(open_run(str(run)))
    assert record is not None
    assert (record.address, record.pid) == (str(place), daemon.process.pid)
    assert daemon.stop() == 0
    assert not place.exists()
    assert not Path(f"/proc/{worker}").exists()
    assert read_daemon_record(open_run(str(run))) is None
    assert daemon.log_lines()[-1]["event"] == "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_in_the_middle_of_a_scan(run: Path, start: Starter, number: signal.Signals) -> None:
    """A scan that would go on is ended with its process, and its checkpoint stays pending."""
    save(run, 1)
    daemon = start(run)
    daemon.known_good(1)
    worker = daemon.child()
    os.kill(worker, signal.SIGSTOP)
    save(run, 2)
    until(lambda: was_asked(worker), "a question to the worker")
    daemon.process.send_signal(number)
    assert daemon.process.wait(PATIENCE) == 0
    assert not Path(f"/proc/{worker}").exists()
    assert once(run).returncode == 0


def test_two_daemons_on_one_run(run: Path, start: Starter) -> None:
    """Two daemons each answer at an address of their own and agree, and so do the records."""
    first = start(run)
    first.logged("guarding")
    second = start(run)
    assert second.address != first.address
    save(run, 100)
    save(run, 200, nan=True)
    for daemon in (first, second):
        assert (daemon.outcome(100), daemon.outcome(200)) == ("good", "bad")
        assert daemon.known_good(100)["step"] == 100
    # Both may have come to the same verdict at the same moment: two entries then say the same.
    names = [p.name.split(".") for p in (run / "_ckptguard" / "ledger").rglob("*.json")]
    assert {(step, generation, outcome) for step, generation, _, outcome, _ in names} == {
        ("000000000100", "1", "good"),
        ("000000000200", "1", "bad"),
    }
    assert second.stop() == 0
    assert first.known_good(100)["step"] == 100
    # The one that stays says again that it is there.
    until(
        lambda: (r := read_daemon_record(open_run(str(run)))) is not None and r.pid == first.process.pid,
        "the remaining daemon's record",
    )


def test_several_runs_fail_and_recover_apart(tmp_path: Path, run: Path, start: Starter) -> None:
    """A run whose records cannot be used is told about and retried; the other is guarded meanwhile."""
    broken = tmp_path / "broken"
    (broken / "_ckptguard").mkdir(parents=True)
    stamp = broken / "_ckptguard" / "format.json"
    stamp.write_text('{"format": 99}')
    save(run, 1)
    daemon = start(broken, run)
    daemon.logged("failing", run=str(broken))
    assert daemon.ask("known-good?wait_seconds=20", run=run)[1]["step"] == 1
    assert daemon.ask("known-good", run=broken)[0] == 503
    stamp.write_text('{"format": 2}')
    daemon.logged("recovered", run=str(broken))


def test_the_daemon_ends_with_its_parent(run: Path, short_folder: Path) -> None:
    """With `--parent`, the daemon stops by itself, cleanly, when that process is gone."""
    starter = (
        "import os, subprocess, sys;"
        "p = subprocess.Popen([sys.executable, '-m', 'ckptguard_daemon', sys.argv[1], '--parent', str(os.getpid()),"
        " '--log-file', sys.argv[2]], stderr=subprocess.DEVNULL); print(p.pid, flush=True); sys.stdin.read()"
    )
    log = short_folder / "log"
    with subprocess.Popen(
        [sys.executable, "-c", starter, str(run), str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "XDG_RUNTIME_DIR": str(short_folder)},
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        until(lambda: log.exists() and "guarding" in log.read_text(), "the daemon's start")
        parent.kill()
    until(lambda: not Path(f"/proc/{child}").exists(), "the daemon's end")
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()][-2:] == ["parent_gone", "stopped"]


@pytest.mark.parametrize(
    ("nan", "truncated", "code"), [(False, False, 0), (True, False, 3), (False, True, 4), (True, True, 3)]
)
def test_once_answers_with_its_exit_code(run: Path, nan: bool, truncated: bool, code: int) -> None:
    """0 all good, 3 something bad, 4 something unfinished, which is not waited for."""
    save(run, 100)
    if nan:
        save(run, 200, nan=True)
    with contextlib.ExitStack() as held:
        if truncated:
            path = save(run, 300)
            info = path.stat()
            os.truncate(path, info.st_size - 1000)
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
            held.enter_context(open(path, "ab"))  # its writer goes on
        done = once(run)
    assert (done.returncode, done.stdout) == (code, "")
    assert open_run(str(run)).records.list("ledger") != []


def test_once_waits_for_what_is_settling(run: Path) -> None:
    """A save that was written just now is waited for and verified."""
    os.utime(save(run, 1))
    assert once(run, CKPTGUARD_SETTLE="0.5").returncode == 0


def test_once_over_a_storage_that_is_not_local() -> None:
    """A run behind a URL is verified inline, by the same passes."""
    url = "memory://daemon-once"
    memory = fsspec.filesystem("memory")
    with tempfile.TemporaryDirectory() as folder:
        for step, nan in ((1, False), (2, True)):
            memory.pipe_file(f"/daemon-once/net-{step}.safetensors", save(Path(folder), step, nan=nan).read_bytes())
    try:
        assert run_once(DaemonPlan(urls=(url,), settings=Settings(settle=0.1)), threading.Event(), ListenOptions()) == 3
        assert {str(s.id): s.outcome.value for s in survey(look(url))} == {"1.1": "good", "2.1": "bad"}
    finally:
        memory.rm("/daemon-once", recursive=True)


def test_once_says_what_it_cannot_do(run: Path, tmp_path: Path) -> None:
    """No run is 10, an empty one is undecided, nonsense is a sentence and 2."""
    missing = once(tmp_path / "missing")
    assert (missing.returncode, missing.stderr.startswith("error: there is no folder")) == (10, True)
    assert once(run).returncode == 4
    assert once(run, CKPTGUARD_SETTLE="soon").returncode == 2
    assert once(run, run / "..", CKPTGUARD_RECORDS=str(tmp_path / "r")).returncode == 2


def test_a_taken_socket_is_refused(run: Path, start: Starter, short_folder: Path) -> None:
    """A second daemon at the same `--socket` ends with 11; after kill -9 the dead socket is replaced."""
    arguments = ("--socket", str(short_folder / "s"))
    first = start(run, arguments=arguments)
    assert first.address == str(short_folder / "s")
    second = DaemonProcess(short_folder, run, arguments=arguments)
    assert second.process.wait(PATIENCE) == 11
    first.kill()
    assert start(run, arguments=arguments).ask("known-good")[0] == 404


def test_the_daemon_imports_nothing_heavy() -> None:
    """No module of the daemon's own process brings torch, numpy, BLAKE3 or the CLI's tables."""
    code = (
        "import sys, ckptguard_daemon.command, ckptguard_daemon.service;"
        "print([m for m in ('torch', 'numpy', 'blake3', 'isal', 'rich', 'fsspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_runtime_folder_of_somebody_else_hinders_nobody(run: Path, start: Starter, short_folder: Path) -> None:
    """The daemon listens in a new folder, which goes with it, and the records say where."""
    (short_folder / "ckptguard").mkdir()
    (short_folder / "ckptguard").chmod(0o777)
    save(run, 100)
    daemon = start(run)
    daemon.known_good(100)
    address = json.loads((run / "_ckptguard" / "daemon.json").read_bytes())["address"]
    assert address == daemon.address
    assert Path(address).parent != short_folder / "ckptguard"
    assert is_alive(open_run(str(run)))
    assert daemon.stop() == 0
    assert not Path(address).parent.exists()


def test_it_follows_the_run(run: Path, start: Starter, short_folder: Path) -> None:
    """Verdicts, damage and incidents are in it as soon as a pass is done; it is the owner's alone. A daemon that starts
    again goes on with what it held."""
    folder = private_runtime_folder({"XDG_RUNTIME_DIR": str(short_folder)})
    id = run_id_of(str(run))
    path = Path(folder) / f"{id}.catalogue"

    def outcomes() -> dict[int | None, str]:
        noted = Catalogue(folder).noted(id)
        rows = noted.generations.values() if noted is not None else ()
        return {row.id.number: row.outcome for row in rows if row.in_place}

    save(run, 100)
    daemon = start(run)
    daemon.known_good(100)
    until(lambda: outcomes() == {100: "good"}, "a verdict in the catalogue")
    assert path.stat().st_mode & 0o077 == 0
    save(run, 200, nan=True)
    until(lambda: outcomes() == {100: "good", 200: "bad"}, "a second verdict")
    noted = Catalogue(folder).noted(id)
    assert noted is not None
    told = {(one.event.kind, one.event.cause) for one in noted.events}
    assert {("verdict", "bad"), ("incident", "numeric")} <= told
    path.unlink()
    save(run, 300)
    until(lambda: outcomes().keys() == {100, 200, 300}, "the file again")
    summary = Catalogue(folder).summary(id)
    assert summary is not None
    assert (summary.known_good_step, summary.protected, summary.incidents) == (300, True, {"numeric": 1})
    assert daemon.stop() == 0
    before = Catalogue(folder).noted(id)
    daemon = start(run)
    daemon.known_good(300)
    page = daemon.ask("page")[1]
    assert before is not None
    assert [event["number"] for event in page["events"]] == [one.number for one in before.events]


_HANGS = """
import threading
from ckptguard_daemon import __main__, liveness, once
liveness._GRACE = 0.1
once.run_once = lambda *_, **__: threading.Event().wait()
__main__.main()
"""


def ended(*arguments: object, **environment: str) -> tuple[int, list[str]]:
    """The exit code of `--once`, and the events that it logged."""
    done = once(*arguments, "--log-format", "json", **environment)
    return done.returncode, events(done.stderr)


def events(log: str) -> list[str]:
    """Those of a log."""
    return [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]


def test_what_is_not_decided_in_time_stays_pending(run: Path) -> None:
    """A read that takes minutes is cut off: exit code 4. The next call decides it, and needs no limit."""
    save(run, 100, numbers=4_000_000)
    code, found = ended(run, "--limit", "1", CKPTGUARD_VERIFY_RATE="65536")
    assert (code, "limit" in found, "verified" in found) == (4, True, False)
    code, found = ended(run)
    assert (code, "limit" in found, "verified" in found) == (0, False, True)
    assert ended(run, "--limit", "10m")[0] == 0


def test_it_ends_although_the_storage_hangs(run: Path) -> None:
    """Work that cannot be stopped does not keep the process: a job's node would wait for it."""
    words = [sys.executable, "-c", _HANGS, str(run), "--once", "--limit", "0.1", "--log-format", "json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, events(done.stderr)) == (4, ["limit", "limit_forced"])


@pytest.mark.parametrize(("found", "code"), [(0, 0), (1, 4), (3, 3), (4, 4)])
def test_the_code_of_work_that_was_cut_off(found: int, code: int) -> None:
    """What is known to be bad stays bad; what could not be told is undecided."""
    assert TimeLimit.code_of(found) == code


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--limit", "soon", "--once"], "time span"), (["--limit", "1m"], "--once")]
)
def test_a_mistaken_limit_is_wrong_usage(run: Path, arguments: list[str], words: str) -> None:
    """One sentence, exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptguard_daemon", str(run), *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, words in done.stderr) == (2, True)
