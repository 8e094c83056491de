"""The daemon from training's side: asked with a deadline, believed only as far as the records go, never needed."""

import contextlib
import json
import os
import socket
import threading
import time

import msgspec
import pytest
import torch
from support.runs import QUICK
from support.views import look

import ckptguard
from ckptguard.inspect.list_states import survey
from ckptguard.records.daemon_record import DaemonRecord, read_daemon_record, write_daemon_record
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.records.who_and_when import this_host
from ckptguard.training import client
from ckptguard.training.client import is_alive, let_daemon_verify, report_incident
from ckptguard.training.rollback import load_known_good
from ckptguard.values.verdict import Outcome

ANSWER = {"series": "step-#", "id": "500.1", "path": "/x", "step": 500}


def answer(document, status=200):
    """An HTTP answer."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return f"HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


@contextlib.contextmanager
def daemon(path, text, *, drip=False):
    """Somebody who listens and answers every question with the same bytes; yields the questions."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen()
    asked = []
    done = threading.Event()

    def serve():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                asked.append(connection.recv(65536))
                for number in range(len(text) if drip else 1):
                    connection.sendall(text[number : number + 1] if drip else text)
                    if drip and done.wait(0.2):
                        return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        done.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


@pytest.fixture
def run(tmp_path):
    """A run whose records name a socket."""
    (tmp_path / "run").mkdir()
    run = open_run(str(tmp_path / "run"))
    name_daemon(run, tmp_path / "s")
    return run


def name_daemon(run, path, **changes):
    """Write daemon.json."""
    host, boot = this_host()
    record = DaemonRecord(address=str(path), host=host, boot_id=boot, pid=1, started_at="")
    write_daemon_record(run, msgspec.structs.replace(record, **changes))


def ask(run, wait=60.0):
    """One question."""
    return let_daemon_verify(run, before_step=600, series="step-#", wait_seconds=wait)


def test_an_answer_is_an_id(run, tmp_path):
    """The question names run, series and step; the answer's id is all that is taken from it."""
    with daemon(tmp_path / "s", answer(ANSWER)) as asked:
        assert str(ask(run)) == "500.1"
        assert is_alive(run, deadline=60.0)
    first = asked[0].split(b"\r\n")[0].decode()
    assert first.startswith(f"GET /v1/runs/{run.run_id}/known-good?")
    assert "before_step=600" in first


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nonsense",
        b"HTTP/1.1 200 OK\r\n\r\n[]",
        answer(b"not json"),
        answer({**ANSWER, "series": "other-#"}),
        answer({**ANSWER, "id": "../../etc"}),
        answer({**ANSWER, "id": 5}),
        answer({"error": {"kind": "no_known_good"}}, status=404),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b"x" * (2 << 20),
    ],
)
def test_anything_else_is_no_answer(run, tmp_path, text):
    """Junk, another series, an error, too much: None, never an exception."""
    with daemon(tmp_path / "s", text):
        assert ask(run) is None
        assert report_incident(run, step=1, cause="x", reason="y", evidence={"loss": float("nan")}) is None


def test_one_who_drips_cannot_hold_training(run, tmp_path):
    """A server that sends a byte at a time is left when the deadline has passed."""
    with daemon(tmp_path / "s", answer(ANSWER), drip=True):
        assert ask(run, wait=-1.5) is None


def test_silence_is_no_answer(run, tmp_path):
    """A socket on which nobody accepts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        assert ask(run, wait=-1.5) is None


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"boot_id": "before"}, {"address": "/nowhere"}])
def test_an_address_of_another_place_or_time_is_ignored(run, tmp_path, changes):
    """Another host, another boot, no socket: nobody is asked."""
    with daemon(tmp_path / "s", answer(ANSWER)) as asked:
        name_daemon(run, tmp_path / "s", **changes)
        assert ask(run) is None
        assert not is_alive(run)
    assert asked == []


def test_a_file_is_no_socket(run, tmp_path):
    """A regular file under the address is not opened."""
    (tmp_path / "s").write_bytes(b"")
    assert ask(run) is None


def train(run, guard_options, *, at=5):
    """Seven steps with a rollback asked for after step `at`; returns the steps taken."""
    model = torch.nn.Linear(4, 4)
    steps = []
    with ckptguard.TrainingGuard(run, model=model, settings=QUICK, **guard_options) as guard:
        for step, _ in guard.steps([1, 2, 3], total=7, save_every=2):
            steps.append(step)
            if len(steps) == at:
                guard.rollback("a test")
    return steps


def test_a_daemon_that_lies_changes_nothing(tmp_path, monkeypatch):
    """An id that the records do not hold is not gone back to; the incident is recorded by ourselves."""
    (tmp_path / "run").mkdir()
    name_daemon(open_run(str(tmp_path / "run")), tmp_path / "s")
    with daemon(tmp_path / "s", answer({**ANSWER, "incident": {"id": "none"}})) as asked:
        options = {"daemon": "auto", "deadlines": ckptguard.Deadlines(daemon=60.0)}
        assert train(tmp_path / "run", options) == [1, 2, 3, 4, 5, 5, 6, 7]
    assert any(b"known-good" in question for question in asked)
    (incident,) = list_incidents(open_run(str(tmp_path / "run")))
    assert (incident.known_good, incident.state) == ("4.1", "closed")


def test_a_dead_daemon_is_done_without(tmp_path, monkeypatch):
    """The daemon that the records name is gone, and none can be started: the records are read directly."""
    (tmp_path / "run").mkdir()
    name_daemon(open_run(str(tmp_path / "run")), tmp_path / "gone")
    monkeypatch.setattr(client, "ensure_daemon", lambda run, settings: None)
    assert train(tmp_path / "run", {"daemon": "auto"}) == [1, 2, 3, 4, 5, 5, 6, 7]


def test_a_child_that_cannot_start_is_a_warning(tmp_path, monkeypatch, caplog):
    """Nothing to start it with: a warning, and training runs."""
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert train(tmp_path / "run", {"daemon": "auto"}) == [1, 2, 3, 4, 5, 5, 6, 7]
    assert "no daemon could be started" in caplog.text


def test_the_child_verifies_and_ends(tmp_path, monkeypatch):
    """daemon="auto" starts a daemon that verifies the saves and takes the incident; close() ends it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(load_known_good, "newest", wait_for_daemon(load_known_good.newest))
    assert train(tmp_path / "run", {"daemon": "auto"}) == [1, 2, 3, 4, 5, 5, 6, 7]
    run = open_run(str(tmp_path / "run"))
    states = [s for s in survey(look(run)) if s.in_place]
    assert [s.step for s in states] == [0, 2, 4, 6, 7]
    assert {s.outcome for s in states} == {Outcome.GOOD}
    assert [i.state for i in list_incidents(run)] == ["closed"]
    assert read_daemon_record(run) is None
    assert (tmp_path / "ckptguard" / f"{run.run_id}.log").stat().st_size
    assert (tmp_path / "ckptguard").stat().st_mode & 0o777 == 0o700


def wait_for_daemon(load):
    """Begin only when the child answers, so that it is there to take part."""

    def waiting(view, *others, **options):
        end = time.monotonic() + 60
        while not is_alive(view.run):
            assert time.monotonic() < end, "the child never answered"
            os.sched_yield()
        return load(view, *others, **options)

    return waiting
