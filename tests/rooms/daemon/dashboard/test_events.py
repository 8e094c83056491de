"""Live events: each once, in order, also after a lost connection; clients that are too slow harm nobody."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from ckptguard_daemon.dashboard import events as events_module
from ckptguard_daemon.http.routes import Caller, Role
from support.daemon_process import PATIENCE, Starter, until
from support.daemon_process import save as save_file
from support.dashboards import Dashboard, Listener, Opener
from support.tiny_run import WEIGHTS, delete, inline, name_of, poison, save

from ckptguard.catalogue.catalogue import MOST_RECENT
from ckptguard.catalogue.rows import Event, event_key
from ckptguard.runs.results import Checked
from ckptguard.runs.work import Work
from ckptguard.values.ids import run_id_of


def happened(dashboard: Dashboard, url: str, count: int, *, first: int = 0) -> None:
    """So many things happen in a run."""
    for number in range(first, first + count):
        event = Event(key=event_key("replica", str(number)), kind="replica", at=1.0, about="s3://x", text=f"n {number}")
        dashboard.catalogue.happened(run_id_of(url), event)


@pytest.fixture
def one(open_dashboard: Opener, folder: str) -> Dashboard:
    """A run that was looked through."""
    dashboard = open_dashboard(folder)
    dashboard.make_passes()
    return dashboard


def test_what_happens_is_told_at_once(one: Dashboard, folder: str) -> None:
    """Verdicts, incidents and losses arrive as the page's document lists them, with their numbers as ids."""
    listener = one.listen()
    assert listener.next() == ("hello", {})
    assert listener.last == one.ask("fleet")["newest_event"]
    poison(Path(folder, name_of(3), WEIGHTS))
    save(folder, 4, 4)
    poison(Path(folder, name_of(4), WEIGHTS))
    delete(folder, 1)
    one.make_passes(2)
    listed = one.ask("page", run=folder)["events"][3:]
    assert {"verdict", "incident", "gone"} <= {event["kind"] for event in listed}
    told = [listener.next() for _ in listed]
    assert told == [("happened", event) for event in listed]
    assert listener.last == listed[-1]["number"] == one.ask("page", run=folder)["newest_event"]
    listener.close()


def test_a_lost_connection_is_taken_up(one: Dashboard, folder: str) -> None:
    """What happened meanwhile is told first; then what happens now. Nothing twice, nothing left out."""
    listener = one.listen()
    listener.next()
    happened(one, folder, 3)
    got = [listener.next()[1]["text"] for _ in range(2)]
    listener.close()
    happened(one, folder, 2, first=3)
    again = one.listen(after=listener.last)
    happened(one, folder, 2, first=5)
    got += [again.next()[1]["text"] for _ in range(5)]
    assert got == [f"n {number}" for number in range(7)]
    again.close()


def test_what_is_too_old_is_a_reset(one: Dashboard, folder: str) -> None:
    """After more events than are queued, and after a number of another catalogue, everything is to be asked again."""
    listener = one.listen()
    listener.next()
    start = listener.last
    listener.close()
    happened(one, folder, MOST_RECENT + 1)
    for after in (start, 1, 2**62):
        late = one.listen(after=after)
        assert late.next() == ("reset", {})
        assert late.last == one.ask("fleet")["newest_event"]
        happened(one, folder, 1, first=1000 + (after or 0) % 1000)
        assert late.next()[0] == "happened"
        late.close()


def test_a_slow_client_holds_nothing_up(one: Dashboard, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads nothing loses its connection; another one gets every event; afterwards it can take up again."""
    monkeypatch.setattr(events_module, "LONGEST_SEND", 0.05)
    slow = socket.socket(socket.AF_UNIX)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.settimeout(PATIENCE)
    slow.connect(one.address)
    slow.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    quick = one.listen()
    quick.next()
    got: list[str] = []
    for batch in range(200):
        happened(one, folder, 50, first=50 * batch)
        got += [quick.next()[1]["text"] for _ in range(50)]
        if len(_hub(one)._waiting) == 1:
            break
    else:
        pytest.fail("the slow client was not dropped")
    assert got == [f"n {number}" for number in range(len(got))]
    while slow.recv(1 << 16):  # what was sent before, then the end
        pass
    slow.close()
    quick.close()


def _hub(dashboard: Dashboard) -> Any:
    [wake] = dashboard.feed._listeners
    return wake.__self__  # type: ignore[attr-defined]


def test_others_runs_never_appear(open_dashboard: Opener, folder: str, tmp_path: Path) -> None:
    """A stream tells only of runs that its token may see, live and when it takes up again."""
    other = tmp_path / "secret"
    other.mkdir()
    dashboard = open_dashboard(folder, str(other))
    dashboard.make_passes()
    first = dashboard.ask("fleet")["newest_event"]
    dashboard.caller = Caller(name="x", role=Role.READER, runs=("run",))
    listener = dashboard.listen()
    listener.next()
    save(str(other), 1, 1)
    save(folder, 4, 4)
    dashboard.make_passes()
    dashboard.make_passes()
    again = dashboard.listen(after=first)
    for stream in (listener, again):
        event, data = stream.next()
        assert (event, data["run"], data["step"]) == ("happened", run_id_of(folder), 4)
        stream.close()


def test_a_quiet_stream_is_pinged(one: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments show both sides that the other one lives."""
    monkeypatch.setattr(events_module, "PING_SECONDS", 0.01)
    listener = one.listen()
    messages = listener.messages()
    assert next(messages)[0] == "hello"
    assert [next(messages) for _ in range(3)] == [("", None)] * 3
    listener.close()
    until(lambda: not _hub(one)._waiting, "the end of the stream")


@pytest.mark.parametrize("after", ["x", "-1", "1.5", "9" * 400, "\u0661"])
def test_a_wrong_number_is_refused(one: Dashboard, after: str) -> None:
    """It is said in a sentence, and nothing is streamed."""
    assert one.ask("events", after=after) == (400, "settings")


def test_without_a_catalogue_events_come_from_memory(open_dashboard: Opener, folder: str) -> None:
    """They are told, numbered and taken up again as well."""
    dashboard = open_dashboard(folder, catalogue=False)
    dashboard.make_passes()
    listener = dashboard.listen()
    assert listener.next()[0] == "hello"
    start = listener.last
    save(folder, 4, 4)
    dashboard.make_passes()
    event, data = listener.next()
    assert (event, data["kind"], data["step"], data["cause"]) == ("happened", "verdict", 4, "good")
    again = dashboard.listen(after=start)
    assert again.next() == (event, data)
    old = dashboard.listen(after=5)
    assert old.next()[0] == "reset"
    for stream in (listener, again, old):
        stream.close()


def test_streams_end_with_the_daemon(run: Path, start: Starter) -> None:
    """SIGTERM ends open streams cleanly: the last chunk arrives, and nothing is complained of."""
    save_file(run, 100)
    daemon = start(run)
    daemon.known_good(100)
    listeners = [Listener(daemon.address) for _ in range(5)]
    for listener in listeners:
        assert listener.next()[0] == "hello"
    save_file(run, 200, nan=True)
    assert [listener.next()[1]["step"] for listener in listeners] == [200] * 5
    assert daemon.stop() == 0
    for listener in listeners:
        list(listener.messages())  # raises IncompleteRead unless the last chunk came
        listener.close()
    assert all(line["level"] in ("info", "warning") for line in daemon.log_lines())


def test_a_verdict_is_told_before_its_pass_ends(one: Dashboard, folder: str) -> None:
    """While the same pass still reads other checkpoints, listeners and the page know of the first one."""
    listener = one.listen()
    listener.next()
    told: list[Any] = []

    def found(checked: Checked) -> None:
        if not told:
            told.append(listener.next()[1])
            told.append([(g["step"], g["outcome"]) for g in one.ask("page", run=folder)["generations"]])

    for step in (4, 5, 6):
        save(folder, step, step)
    [run] = one.runs
    run._note_again_at = 0.0  # none was noted so lately
    run.step(Work(scanner=inline, on_verdict=found))
    assert (told[0]["step"], told[0]["cause"]) == (4, "good")
    assert told[1] == [(step, "good") for step in (1, 2, 3, 4)]
    assert [listener.next()[1]["step"] for _ in range(2)] == [5, 6]
    listener.close()
