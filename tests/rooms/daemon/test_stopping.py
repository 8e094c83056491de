"""A stop ends the daemon, whatever hangs: nothing is left running, and the next start makes up for what was left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ckptguard_daemon.service import CallsAtOnce
from servers.faulty_proxy import FaultyProxy
from servers.fixtures import S3_BUCKETS
from servers.s3 import S3Server
from support import hanging
from support.daemon_process import PATIENCE, DaemonProcess, Starter, is_alive, request, save, until, was_asked
from support.hook_commands import TELL, command, told, toml

import ckptguard
from ckptguard.values.settings import Settings

# Nothing here hangs for less than for ever. A daemon that waits for it is found out, and a busy machine is not.
IN_TIME = 60.0
STORAGE = "ckptguard.storage.local.local_storage:LocalStorage"
# What may hang inside the daemon, as in a dead mount. Some of it is only reached when the daemon stops.
FUNCTIONS = {
    "listing a run": f"{STORAGE}.list",
    "reading a record": f"{STORAGE}.open~daemon",
    "sealing": f"{STORAGE}.create~manifests/",
    "recording a verdict": f"{STORAGE}.create~ledger/",
    "recording an incident": f"{STORAGE}.create~incidents/",
    "noting who was told": "ckptguard.reporting.notify:mark_notified",
    "starting a scan": "ckptguard.scan.process.worker_process:WorkerProcess.start",
    "writing the catalogue": "ckptguard.catalogue.catalogue:replace_file",
    "the main thread": "ckptguard_daemon.liveness:Systemd.tell_progress",
}
AT_THE_STOP = {
    "clearing the daemon's record": "ckptguard.engine.watched_run:clear_daemon_record",
    "closing the socket": "ckptguard_daemon.http.unix_socket:ListeningSocket.close",
    "telling systemd": "ckptguard_daemon.liveness:Systemd.is_stopping",
}


def program(where: str, marker: Path) -> tuple[str, ...]:
    """A daemon in which this hangs."""
    return (hanging.__file__, where, str(marker), "ckptguard_daemon")


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found |= {int(word) for word in (task / "children").read_text().split()}
    return found.union(*map(descendants, found))


def stopped(daemon: DaemonProcess, number: int = signal.SIGTERM) -> int:
    """Stop it. It ends in time, and so does all that it has started. Returns its exit code."""
    below = descendants(daemon.process.pid)
    daemon.process.send_signal(number)
    code = daemon.process.wait(IN_TIME)
    until(lambda: not any(is_alive(pid) for pid in below), "the end of what it had started")
    return code


def facts(run: Any, path: Path, settings: Settings | None = None) -> dict[str, Any]:
    """What is on record of a run, and what people were told of it."""
    events = {event["id"]: (event["event"], event["step"], event["cause"]) for event in told(path)}
    return {
        "checkpoints": {(c.path, c.step, c.outcome.value) for c in ckptguard.checkpoints(run, settings=settings)},
        "incidents": [(one.step, one.cause) for one in ckptguard.incidents(run, settings=settings)],
        "told": sorted(events.values()),
    }


EXPECTED = {
    "checkpoints": {("net-100.safetensors", 100, "good"), ("net-200.safetensors", 200, "bad")},
    "incidents": [(200, "numeric")],
    "told": [("verdict", 200, "bad")],
}


def assert_made_up(daemon: DaemonProcess, run: Any, path: Path, settings: Settings | None = None) -> None:
    """The next daemon comes to what one says that was never stopped."""
    assert daemon.outcome(100) == "good"
    assert daemon.outcome(200) == "bad"
    until(lambda: facts(run, path, settings)["incidents"] and told(path), "the incident and the message")
    assert daemon.stop() == 0
    assert facts(run, path, settings) == EXPECTED


@pytest.fixture
def hooked(run: Path, start: Starter, tmp_path: Path) -> tuple[str, ...]:
    """The arguments of a daemon whose messages are kept in `told`. An earlier one has verified a first save: a channel
    that is new begins with what comes."""
    arguments = toml(tmp_path, on_incident=command(tmp_path / "told"))
    save(run, 100)
    first = start(run, arguments=("--once", *arguments))
    assert first.process.wait(PATIENCE) == 0
    return arguments


def test_a_daemon_that_is_not_stopped(run: Path, start: Starter, tmp_path: Path, hooked: tuple[str, ...]) -> None:
    """What the others are compared with."""
    save(run, 200, nan=True)
    assert_made_up(start(run, arguments=hooked), run, tmp_path / "told")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_hangs_inside_does_not_hold_up_a_stop(
    name: str, run: Path, start: Starter, tmp_path: Path, hooked: tuple[str, ...]
) -> None:
    """It ends with 0, and the next daemon makes up for the verdict, the incident and the message."""
    marker = tmp_path / "hangs"
    save(run, 200, nan=True)
    daemon = start(run, arguments=hooked, program=program(FUNCTIONS[name], marker))
    until(marker.exists, "something that hangs")
    assert stopped(daemon) == 0
    assert_made_up(start(run, arguments=hooked), run, tmp_path / "told")


@pytest.mark.parametrize("name", AT_THE_STOP)
def test_what_hangs_at_the_stop_does_not_hold_it_up(
    name: str, run: Path, start: Starter, tmp_path: Path, hooked: tuple[str, ...]
) -> None:
    """The same where all was well until then."""
    marker = tmp_path / "hangs"
    save(run, 200, nan=True)
    daemon = start(run, arguments=hooked, program=program(AT_THE_STOP[name], marker))
    assert daemon.outcome(200) == "bad"
    assert stopped(daemon) == 0
    assert marker.exists()
    assert_made_up(start(run, arguments=hooked), run, tmp_path / "told")


@pytest.mark.parametrize("where", ["listing a run", "the main thread"])
def test_the_end_of_the_parent_is_a_stop(where: str, run: Path, tmp_path: Path, short_folder: Path) -> None:
    """A daemon that a training started ends with it, also if its own thread hangs."""
    marker, note = tmp_path / "hangs", tmp_path / "pid"
    words = [*program(FUNCTIONS[where], marker), str(run), "--log-file", str(short_folder / "log")]
    starter = (
        "import os, pathlib, subprocess, sys\n"
        "words = [sys.executable, *sys.argv[2:], '--parent', str(os.getpid())]\n"
        "daemon = subprocess.Popen(words, stderr=subprocess.DEVNULL)\n"
        "pathlib.Path(sys.argv[1]).write_text(str(daemon.pid))\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starter, str(note), *words],
        stdin=subprocess.PIPE,
        env={**os.environ, "XDG_RUNTIME_DIR": str(short_folder)},
    ) as parent:
        until(marker.exists, "something that hangs")
        parent.kill()
    until(lambda: not is_alive(int(note.read_text())), "the daemon's end", IN_TIME)


@pytest.mark.parametrize("error", [IndexError, ValueError, OSError])
def test_what_fails_at_the_stop_holds_up_nothing_else(error: type[Exception]) -> None:
    """Of many runs that cannot be left, each is tried."""
    made: list[int] = []

    def leave(number: int) -> None:
        made.append(number)
        raise error("no answer")

    CallsAtOnce(partial(leave, number) for number in range(20)).wait(PATIENCE)
    assert sorted(made) == list(range(20))


def test_a_stop_while_it_starts(run: Path, short_folder: Path) -> None:
    """No signal is lost, also not one that comes while the daemon prepares for signals."""
    program = (
        "import os, signal\n"
        "honest = signal.set_wakeup_fd\n"
        "signal.set_wakeup_fd = lambda *to, **how: (os.kill(os.getpid(), signal.SIGTERM), honest(*to, **how))\n"
        "from ckptguard_daemon.__main__ import main\n"
        "main()\n"
    )
    words = [sys.executable, "-c", program, str(run)]
    ended = subprocess.run(words, env={**os.environ, "XDG_RUNTIME_DIR": str(short_folder)}, timeout=IN_TIME)
    assert ended.returncode in (0, -signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_pass_ends_too(number: signal.Signals, run: Path, start: Starter, tmp_path: Path) -> None:
    """`--once` ends with 130 when it is stopped, and the next one does all of it."""
    marker = tmp_path / "hangs"
    save(run, 100)
    daemon = start(run, arguments=("--once",), program=program(FUNCTIONS["recording a verdict"], marker))
    until(marker.exists, "something that hangs")
    assert stopped(daemon, number) == 130
    assert start(run, arguments=("--once",)).process.wait(PATIENCE) == 0


class Silent:
    """A server that takes connections, and answers nothing, or one byte now and then, until it `answers`."""

    def __init__(self, *, drips: bool) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.taken, self.answers = threading.Event(), threading.Event()
        self.posted: list[Any] = []
        self._drips = drips
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if not self.answers.is_set():
                self.taken.set()
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: " if self._drips else b"")
                while not self.answers.wait(0.1):
                    connection.sendall(b"x" if self._drips else b"")
                return
            text = b""
            while not text.endswith(b"}\n") and not text.endswith(b"}"):
                text += connection.recv(65536)
            self.posted.append(json.loads(text.partition(b"\r\n\r\n")[2]))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def close(self) -> None:
        """Take no more connections."""
        self.answers.set()
        self._socket.close()


@pytest.fixture(params=[False, True], ids=["silent", "dripping"])
def silent(request: pytest.FixtureRequest) -> Iterator[Silent]:
    """A server, until the end."""
    server = Silent(drips=request.param)
    yield server
    server.close()


def test_a_webhook_that_never_answers(run: Path, start: Starter, tmp_path: Path, silent: Silent) -> None:
    """The next daemon tells what this one could not."""
    arguments = toml(tmp_path, webhook=f"http://127.0.0.1:{silent.port}/hook")
    save(run, 100)
    assert start(run, arguments=("--once", *arguments)).process.wait(PATIENCE) == 0
    save(run, 200, nan=True)
    daemon = start(run, arguments=arguments)
    assert silent.taken.wait(PATIENCE)
    assert stopped(daemon) == 0
    silent.answers.set()
    again = start(run, arguments=arguments)
    until(lambda: silent.posted, "the message")
    assert again.stop() == 0
    assert [(event["event"], event["step"]) for event in silent.posted] == [("verdict", 200)]


def test_a_hook_that_never_ends(run: Path, start: Starter, tmp_path: Path) -> None:
    """It is killed with its children, also those that ignore signals; the next daemon runs it again."""
    path, began = tmp_path / "told", tmp_path / "began"
    hangs = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        f"began = pathlib.Path({str(began)!r})\n"
        "if not began.exists():\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    subprocess.Popen(['sleep', '1000'])\n"
        "    began.touch()\n"
        "    time.sleep(1000)\n"
    )
    arguments = toml(tmp_path, on_incident=[sys.executable, "-c", hangs + TELL.format(path=str(path))])
    save(run, 100)
    assert start(run, arguments=("--once", *arguments)).process.wait(PATIENCE) == 0
    save(run, 200, nan=True)
    daemon = start(run, arguments=arguments)
    until(began.exists, "the command's start")
    assert stopped(daemon) == 0
    assert_made_up(start(run, arguments=arguments), run, path)


def test_a_hook_does_not_outlive_a_forced_stop(run: Path, start: Starter, tmp_path: Path) -> None:
    """Also where the thread that would end it hangs itself."""
    began = tmp_path / "began"
    arguments = toml(tmp_path, on_incident=["sh", "-c", f"touch {began}; sleep 1000"])
    where = program("ckptguard.reporting.notify:HookSets.close", tmp_path / "hangs")
    save(run, 200, nan=True)
    daemon = start(run, arguments=arguments, program=where)
    until(began.exists, "the command's start")
    assert stopped(daemon) == 0


def test_a_scan_that_never_ends(run: Path, start: Starter, tmp_path: Path, hooked: tuple[str, ...]) -> None:
    """A scanning process that hangs is gone with the daemon."""
    daemon = start(run, arguments=hooked)
    assert daemon.outcome(100) == "good"
    assert daemon.post("verify", {"path": "net-100.safetensors"})[0] == 202
    worker = daemon.child()
    os.kill(worker, signal.SIGSTOP)
    save(run, 200, nan=True)
    until(lambda: was_asked(worker), "a question to the worker")
    assert stopped(daemon) == 0
    assert_made_up(start(run, arguments=hooked), run, tmp_path / "told")


def test_clients_that_stay(run: Path, start: Starter, tmp_path: Path, hooked: tuple[str, ...]) -> None:
    """One that listens to events, one that waits for a verdict, one that sends half a request, one that sends
    nothing."""
    daemon = start(run, arguments=hooked)
    assert daemon.outcome(100) == "good"
    texts = (
        b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n",
        f"GET {daemon.url('known-good?wait_seconds=600&after_step=9')} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        f"POST {daemon.url('incidents')} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode(),
        b"",
    )
    with contextlib.ExitStack() as held:
        for text in texts:
            client = held.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(daemon.address)
            client.sendall(text)
        assert daemon.ask("checkpoints")[0] == 200  # the others were read by now
        assert stopped(daemon) == 0
    save(run, 200, nan=True)
    assert_made_up(start(run, arguments=hooked), run, tmp_path / "told")


def test_a_log_that_nobody_reads(run: Path, tmp_path: Path, short_folder: Path) -> None:
    """Each thread that logs hangs, and so would the one that ends the daemon if it logged."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"x" * 4096)
    save(run, 100)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(short_folder), "CKPTGUARD_SETTLE": "0.1"}
    words = [sys.executable, "-m", "ckptguard_daemon", str(run)]
    with subprocess.Popen(words, stderr=writing, env=environment) as daemon:
        try:
            os.close(writing)
            until(lambda: _answers(short_folder), "an answer, which comes before the first line")
            daemon.terminate()
            assert daemon.wait(IN_TIME) == 0
        finally:
            daemon.kill()
            os.close(reading)


def _answers(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(request(str(path), "GET", "/healthz") for path in folder.glob("ckptguard/*.sock"))
    return False


def test_a_place_of_a_fleet_that_hangs(run: Path, start: Starter, tmp_path: Path, hooked: tuple[str, ...]) -> None:
    """While it is searched for runs."""
    save(run, 200, nan=True)
    where = program("ckptguard.fleet.search:RunSearch.find", tmp_path / "hangs")
    daemon = start(arguments=("--fleet", str(run.parent), *hooked), program=where)
    until((tmp_path / "hangs").exists, "a search that hangs")
    assert stopped(daemon) == 0
    assert_made_up(start(run, arguments=hooked), run, tmp_path / "told")


HELD = {"everything": "", "the ledger": "ledger"}


@pytest.mark.parametrize("held", HELD)
def test_a_store_that_never_answers(
    held: str, tmp_path: Path, moto: S3Server, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store takes requests and does not answer, from the start or for some records; the next daemon does what
    is left."""
    path, folder = tmp_path / "told", f"run-{uuid.uuid4().hex[:12]}"
    url: Any = f"s3://{S3_BUCKETS[0]}/{folder}"
    client = moto.client()

    def put(found: Path) -> None:
        client.upload_file(str(found), S3_BUCKETS[0], f"{folder}/{found.name}")

    def options(endpoint: str) -> dict[str, Any]:
        return {f"s3://{S3_BUCKETS[0]}": {**moto.options, "endpoint_url": endpoint}}

    arguments = toml(tmp_path, on_incident=command(path))
    put(save(tmp_path, 100))
    plain = json.dumps(options(moto.endpoint))
    first = start(url, arguments=("--once", *arguments), CKPTGUARD_STORAGE=plain, CKPTGUARD_KEEP="none")
    assert first.process.wait(PATIENCE) == 0
    put(save(tmp_path, 200, nan=True))
    with FaultyProxy(moto.endpoint, share=0.0, held=HELD[held] or folder).running() as proxy:
        through = json.dumps(options(proxy.url))
        daemon = start(url, arguments=arguments, CKPTGUARD_STORAGE=through, CKPTGUARD_KEEP="none")
        until(lambda: proxy.counts["held"], "a request that hangs")
        assert stopped(daemon) == 0
    again = start(url, arguments=arguments, CKPTGUARD_STORAGE=plain, CKPTGUARD_KEEP="none")
    assert_made_up(again, url, path, Settings(storage=options(moto.endpoint)))


def test_a_replica_that_never_answers(
    run: Path, start: Starter, tmp_path: Path, moto: S3Server, hooked: tuple[str, ...]
) -> None:
    """An upload hangs; the next daemon sends the checkpoint."""
    name = uuid.uuid4().hex[:12]
    place = f"s3://{S3_BUCKETS[0]}/{name}/{{run}}"
    with FaultyProxy(moto.endpoint, share=0.0, held=name).running() as proxy:
        where = {f"s3://{S3_BUCKETS[0]}": {**moto.options, "endpoint_url": proxy.url}}
        settings = {"CKPTGUARD_REPLICAS": json.dumps([place]), "CKPTGUARD_STORAGE": json.dumps(where)}
        daemon = start(run, arguments=hooked, **settings)
        until(lambda: proxy.counts["held"], "a request that hangs")
        assert stopped(daemon) == 0
        proxy.released.set()
        save(run, 200, nan=True)
        again = start(run, arguments=hooked, **settings)
        again.logged("replicated", path="net-100.safetensors")
        assert_made_up(again, run, tmp_path / "told")
