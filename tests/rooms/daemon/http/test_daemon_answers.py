"""The HTTP contract: every document as http.md shows it, and a sentence for every bad question."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from support.daemon_process import PATIENCE, DaemonProcess, Starter, request, save, until, was_asked
from support.http_documents import assert_like, example


@pytest.fixture
def guarded(run: Path, start: Starter) -> DaemonProcess:
    """A daemon over a run with one good checkpoint."""
    save(run, 500)
    daemon = start(run)
    daemon.known_good(500)
    return daemon


def send_question(daemon: DaemonProcess, path: str) -> socket.socket:
    """Ask, and leave the answer unread."""
    asking = socket.socket(socket.AF_UNIX)
    asking.settimeout(PATIENCE)
    asking.connect(daemon.address)
    question = f"GET {daemon.url(path)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    asking.sendall(question.encode())
    return asking


def test_every_answer_is_as_documented(guarded: DaemonProcess) -> None:
    """Each endpoint answers with the status, keys and types of its example."""
    until(lambda: request(guarded.address, "GET", "/readyz")[0] == 200, "the end of the first pass")
    answers = {
        "GET /healthz": request(guarded.address, "GET", "/healthz"),
        "GET /readyz": request(guarded.address, "GET", "/readyz"),
        "GET /v1/runs": request(guarded.address, "GET", "/v1/runs"),
        "GET /v1/runs/{run}/checkpoints": guarded.ask("checkpoints"),
        "GET /v1/runs/{run}/known-good": guarded.ask("known-good?before_step=501&wait_seconds=1"),
        "POST /v1/runs/{run}/incidents": guarded.post("incidents", {"reason": "NaN", "step": 512}),
        "POST /v1/runs/{run}/verify": guarded.post("verify", {"path": "net-500.safetensors"}),
        "errors": guarded.ask("known-good?before_step=500"),
    }
    statuses = {title: status for title, (status, _) in answers.items()}
    assert list(statuses.values()) == [200, 200, 200, 200, 200, 201, 202, 404]
    assert answers["errors"][1]["error"]["kind"] == "no_known_good"  # `before_step` leaves out that very step
    for title, (_, answer) in answers.items():
        assert_like(answer, example(title), title)
        assert title == "errors" or list(answer)[:2] == ["schema", "command"]


def deep(levels: int) -> bytes:
    """An incident whose evidence is nested so deep."""
    return b'{"reason": "x", "evidence": {"a": ' + b"[" * levels + b"]" * levels + b"}}"


def test_a_series_can_be_named(run: Path, start: Starter) -> None:
    """With `series`, another series neither answers nor is waited for."""
    save(run, 100, age=7200)
    save(run, 200, age=7200).rename(run / "other-200.safetensors")
    daemon = start(run, CKPTGUARD_SETTLE="3600")
    daemon.known_good(200)
    save(run, 300, age=0)
    status, answer = daemon.ask("known-good?wait_seconds=20&series=other-%23.safetensors")
    assert (status, answer["id"], answer["pending"]) == (200, "200.1", [])
    assert daemon.ask("known-good?series=net-%23.safetensors")[1]["id"] == "100.1"
    assert daemon.ask("known-good?series=nothing")[0] == 404


def test_a_question_waits_for_the_verdict(run: Path, start: Starter) -> None:
    """A waiting question is answered when the newer checkpoint has its verdict, without being asked again."""
    save(run, 100)
    daemon = start(run)
    daemon.known_good(100)
    worker = daemon.child()
    os.kill(worker, signal.SIGSTOP)
    save(run, 200)
    until(lambda: was_asked(worker), "a question to the worker")
    asking = send_question(daemon, "known-good?wait_seconds=600")
    # When what is asked later has its answer, the other one waits.
    until(lambda: daemon.ask("known-good")[1]["pending"] == ["net-200.safetensors"], "the answer without waiting")
    os.kill(worker, signal.SIGCONT)
    with asking, asking.makefile("rb") as answering:
        answer = json.loads(answering.read().partition(b"\r\n\r\n")[2])
    assert (answer["step"], answer["waited"], answer["pending"]) == (200, True, [])


def test_waiting_blocks_nobody(run: Path, start: Starter) -> None:
    """With a hundred waiting questions the daemon answers others, and still stops within its time."""
    save(run, 100)
    daemon = start(run, CKPTGUARD_SETTLE="1000")
    daemon.post("verify")
    save(run, 200, age=0)
    sockets = [send_question(daemon, "known-good?wait_seconds=600") for _ in range(100)]
    assert request(daemon.address, "GET", "/healthz")[0] == 200
    assert daemon.ask("checkpoints")[0] == 200
    assert daemon.stop() == 0
    for asking in sockets:
        asking.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/nothing", None, 404, "not_found"),
        ("GET", "/v1/runs/000000000000/checkpoints", None, 404, "not_found"),
        ("GET", "/v1/runs/..%2f..%2fetc/checkpoints", None, 404, "not_found"),
        ("POST", "/healthz", None, 405, "method"),
        ("GET", "{run}/known-good?before_step=five", None, 400, "settings"),
        ("GET", "{run}/known-good?before_step=-1", None, 400, "settings"),
        ("GET", "{run}/known-good?before_step=" + "9" * 5000, None, 400, "settings"),
        ("GET", "{run}/known-good?wait_seconds=nan", None, 400, "settings"),
        ("POST", "{run}/incidents", None, 400, "settings"),
        ("POST", "{run}/incidents", b"{", 400, "settings"),
        ("POST", "{run}/incidents", b"\xff\xfe", 400, "settings"),
        ("POST", "{run}/incidents", b"[" * 60_000, 400, "settings"),
        *(("POST", "{run}/incidents", deep(n), 400, "settings") for n in (33, 900, 990, 5000)),
        ("POST", "{run}/incidents", b'{"reason": NaN}', 400, "settings"),
        ("POST", "{run}/incidents", b'{"reason": "x", "step": "one"}', 400, "settings"),
        ("POST", "{run}/incidents", b'{"reason": "' + b"x" * 70_000 + b'"}', 413, "too_large"),
        ("POST", "{run}/verify", b'{"path": "../../etc"}', 400, "settings"),
        ("POST", "{run}/verify", b'{"path": "/etc/passwd"}', 400, "settings"),
        ("POST", "{run}/verify", b'{"path": "net-7.pt"}', 404, "not_found"),
    ],
)
def test_bad_questions_get_a_sentence(
    hostile: DaemonProcess, method: str, path: str, body: bytes | None, status: int, kind: str
) -> None:
    """Whatever is asked, the answer is a status and one error document."""
    found, answer = request(hostile.address, method, path.replace("{run}", hostile.url("").rstrip("/")), body)
    assert (found, list(answer), answer["error"]["kind"]) == (status, ["error"], kind)
    assert answer["error"]["message"]
    assert not re.search(r"Expected|JSON is malformed|\$|Object |Recursion", answer["error"]["message"])


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "127.0.0.1:80"}, {"Origin": "http://localhost"}, {"Origin": "null"}],
)
def test_browsers_are_refused(hostile: DaemonProcess, headers: dict[str, str]) -> None:
    """A foreign Host or any Origin is 403, whatever the route."""
    status, answer = request(hostile.address, "POST", hostile.url("verify"), headers=headers)
    assert (status, answer["error"]["kind"]) == (403, "forbidden")


def test_noise_does_not_end_it(hostile: DaemonProcess) -> None:
    """Garbage, half requests and vanished callers leave the daemon answering."""
    for noise in (b"\0" * 1000, b"GET / HT", b"POST /v1/runs HTTP/1.1\r\nContent-Length: 99\r\n\r\n{", b"x" * 100_000):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(hostile.address)
            try:
                caller.sendall(noise)
            except BrokenPipeError:
                pass  # refused before all of it arrived
    assert request(hostile.address, "GET", "/healthz")[0] == 200


def test_many_ask_at_once(hostile: DaemonProcess) -> None:
    """Fifty callers at once all get the same answer."""
    answers: list[int] = []
    callers = [threading.Thread(target=lambda: answers.append(hostile.ask("checkpoints")[0])) for _ in range(50)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert answers == [200] * 50


def test_incidents_are_recorded(guarded: DaemonProcess, run: Path) -> None:
    """A reported incident lies in the run's records, and hostile text in it stays text. Of long texts it holds the
    beginning, and how long they were."""
    status, answer = guarded.post("incidents", {"reason": "\x1b[2J NaN", "step": 7, "evidence": {"loss": "nan"}})
    assert status == 201
    recorded = [json.loads(p.read_bytes()) for p in (run / "_ckptguard" / "incidents").iterdir()]
    assert recorded == [answer["incident"]]
    assert "\\u001b[2J NaN" in guarded.logged("incident")["reason"]
    status, answer = guarded.post("incidents", {"reason": "x" * 60_000, "evidence": {"a": ["y" * 3000]}})
    reason = answer["incident"]["reason"]
    assert (status, reason[:2000], reason[-18:]) == (201, "x" * 2000, "(60000 characters)")
    assert len(json.dumps(answer)) < 10_000


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One daemon over an empty run, for questions that change nothing."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="cg-"))
    daemon = DaemonProcess(folder, tmp_path_factory.mktemp("hostile"))
    until(lambda: daemon.logged("guarding"), "the start")
    yield daemon
    daemon.kill()
    print(daemon.log_path.read_text())
    shutil.rmtree(folder)
