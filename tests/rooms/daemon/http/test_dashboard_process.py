"""``ckptguard dashboard`` and ``ckptguard token`` as processes: what they print, who gets in, and who guards."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.daemon_process import PATIENCE, Starter, save, until

from ckptguard.records.daemon_record import read_daemon_record
from ckptguard.records.run import open_run
from ckptguard.values.access import parse_tokens
from ckptguard.values.ids import run_id_of


class Dashboard:
    """``ckptguard dashboard``, after it printed its link."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.log = folder / "dashboard.log"
        command = [sys.executable, "-m", "ckptguard", "dashboard", *words]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CKPTGUARD_")}
        environment = {
            **kept,
            "XDG_RUNTIME_DIR": str(folder),
            "CKPTGUARD_SCAN_INTERVAL": "1",
            "CKPTGUARD_SETTLE": "0.2",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, cwd=folder, env=environment, text=True
            )
        assert self.process.stdout is not None
        self.link = self.process.stdout.readline().strip()
        assert self.link, self.log.read_text()
        self.cookie = ""

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """(status, document) of a request with the session, if there is one."""
        parts = urlsplit(self.link)
        connection = http.client.HTTPConnection(parts.netloc, timeout=PATIENCE)
        headers = {"Origin": f"http://{parts.netloc}", "Cookie": self.cookie}
        connection.request(method, path, json.dumps(body).encode() if body is not None else None, headers)
        answer = connection.getresponse()
        self.cookie = (answer.getheader("set-cookie") or self.cookie).partition(";")[0]
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text)

    def log_in(self) -> int:
        """Follow the link as its page does."""
        return self.ask("POST", "/v1/session", {"token": urlsplit(self.link).fragment})[0]

    def logged(self, event: str) -> dict[str, Any]:
        """The first line of this event, once it is there."""

        def look() -> dict[str, Any] | None:
            text = self.log.read_text()
            lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
            assert self.process.poll() is None, text
            return next((line for line in lines if line["event"] == event), None)

        return until(look, event)

    def known_good(self, run: Path) -> int:
        """The step that is known to be good, once there is one."""

        def look() -> int | None:
            status, answer = self.ask("GET", f"/v1/runs/{run_id_of(str(run))}/known-good")
            return int(answer["step"]) if status == 200 else None

        return until(look, "a known-good checkpoint")


@pytest.fixture
def dashboard(short_folder: Path) -> Iterator[Callable[..., Dashboard]]:
    """Starts dashboards; each ends with the test."""
    started: list[Dashboard] = []

    def start_one(*words: str) -> Dashboard:
        started.append(Dashboard(short_folder, *words))
        return started[-1]

    yield start_one
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_the_link_lets_its_owner_in_once(run: Path, dashboard: Callable[..., Dashboard]) -> None:
    """It guards a run that nobody guards, shows it, and ends whole; the secret is in no process list."""
    save(run, 100)
    shown = dashboard(str(run))
    secret = urlsplit(shown.link).fragment
    assert urlsplit(shown.link).hostname == "127.0.0.1"
    assert len(secret) > 30
    assert secret not in Path(f"/proc/{shown.process.pid}/cmdline").read_text()
    assert shown.ask("GET", "/v1/me")[0] == 401
    assert shown.log_in() == 201
    assert shown.ask("GET", "/v1/me")[1]["role"] == "operator"
    assert shown.known_good(run) == 100
    assert shown.log_in() == 401
    assert secret not in shown.log.read_text()
    shown.process.send_signal(signal.SIGINT)
    assert shown.process.wait(PATIENCE) == 0
    assert read_daemon_record(open_run(str(run))) is None


def test_a_reader_only_looks(run: Path, dashboard: Callable[..., Dashboard]) -> None:
    """With --read-only nothing can be changed through the page."""
    shown = dashboard(str(run), "--read-only")
    assert shown.log_in() == 201
    assert shown.ask("GET", "/v1/me")[1]["actions"] == []
    assert shown.ask("POST", f"/v1/runs/{run_id_of(str(run))}/verify", {})[0] == 403


def test_a_guarded_run_is_only_looked_at(run: Path, start: Starter, dashboard: Callable[..., Dashboard]) -> None:
    """While another daemon lives its verdicts are shown, and it stays the run's daemon. Then the dashboard guards."""
    save(run, 100)
    daemon = start(run)
    daemon.known_good(100)
    record = read_daemon_record(open_run(str(run)))
    shown = dashboard(str(run))
    assert shown.log_in() == 201
    shown.logged("looking")
    assert shown.known_good(run) == 100
    save(run, 200)
    daemon.known_good(200)
    until(lambda: shown.known_good(run) == 200, "the other daemon's verdict")
    assert read_daemon_record(open_run(str(run))) == record
    assert '"verified"' not in shown.log.read_text()
    daemon.kill()
    shown.logged("guarding")
    save(run, 300)
    until(lambda: shown.known_good(run) == 300, "a verdict of its own")
    now = read_daemon_record(open_run(str(run)))
    assert now is not None
    assert now.pid == shown.process.pid


def test_tokens_come_and_go_without_a_restart(run: Path, tmp_path: Path, start: Starter) -> None:
    """What `ckptguard token` adds works at once, for its runs; SIGHUP ends nothing; a removed line locks out."""
    tokens = tmp_path / "tokens"

    def new(name: str, *words: str) -> str:
        command = [sys.executable, "-m", "ckptguard", "token", name, "--file", str(tokens), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    first = new("alice", "--role", "operator")
    daemon = start(run, arguments=("--http", "127.0.0.1:0", "--tokens", str(tokens)))
    address = urlsplit(daemon.logged("http")["url"]).netloc

    def status(secret: str, path: str = "/v1/me") -> int:
        connection = http.client.HTTPConnection(address, timeout=PATIENCE)
        connection.request("GET", path, headers={"Authorization": f"Bearer {secret}"})
        found = connection.getresponse().status
        connection.close()
        return found

    assert status(first) == 200
    second = new("bob", "--run", "other/*", "--expires", "30d")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.logged("tokens_read")
    assert status(second) == 200
    assert status(second, f"/v1/runs/{run_id_of(str(run))}/checkpoints") == 404
    assert status(first, f"/v1/runs/{run_id_of(str(run))}/checkpoints") == 200
    alice, bob = parse_tokens(tokens.read_text())
    assert (alice.role.word, bob.role.word, bob.runs) == ("operator", "reader", ("other/*",))
    assert bob.expires is not None
    tokens.write_text(f"{alice.line}\n")
    daemon.logged("tokens_read", tokens=1)
    assert [status(first), status(second)] == [200, 401]
    assert daemon.stop() == 0


def test_the_token_command_says_what_it_made(tmp_path: Path) -> None:
    """With --json all of it; a wrong name or file is one sentence."""
    command = [sys.executable, "-m", "ckptguard", "token"]
    made = subprocess.run(
        [*command, "alice", "--file", str(tmp_path / "t"), "--json"], capture_output=True, text=True, check=True
    )
    document = json.loads(made.stdout)
    assert (document["name"], document["role"], document["patterns"], document["expires"]) == (
        "alice",
        "reader",
        None,
        None,
    )
    assert len(document["token"]) > 30
    for words in (["al ice"], ["bob", "--run", "a b"], ["bob", "--expires", "soon"], ["alice"]):
        wrong = subprocess.run([*command, *words, "--file", str(tmp_path / "t")], capture_output=True, text=True)
        assert wrong.returncode == 2
        assert wrong.stderr.startswith("error: ")
        assert wrong.stdout == ""
