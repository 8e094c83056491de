"""Telling people: nothing is lost or told twice by a restart, nothing secret is shown, and nothing is waited for."""

import base64
import importlib.util
import json
import os
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from support.daemon_process import PATIENCE, until
from support.runs import write_torch
from support.tiny_run import inline
from support.views import look
from support.web_listener import listening

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import RecordsError
from ckptguard.records.incidents import open_incident
from ckptguard.records.run import begin_run, list_records, open_run
from ckptguard.records.silences import end_silence, silence_run
from ckptguard.reporting import channels, events, notify
from ckptguard.reporting.channels import channels_of, try_out
from ckptguard.reporting.events import incident_event, replica_event, trial_event, verdict_event
from ckptguard.reporting.notify import Hooks
from ckptguard.runs.results import Checked
from ckptguard.runs.work import Work
from ckptguard.upkeep import samples
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Finding, Outcome, Severity
from ckptguard.verification.checkpoint import verify_checkpoint

# Its hundred services import what they need, with all that this warns of.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")
needs_apprise = pytest.mark.skipif(importlib.util.find_spec("apprise") is None, reason="apprise is not installed")
SECRETS = ("s3cr3t", "someone")


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Pauses between two tries take no time."""
    monkeypatch.setattr(notify, "_FIRST_PAUSE", 0.0)


class Telling:
    """One process that tells: hooks, and what they logged."""

    def __init__(self, *urls, **settings):
        self.lines = []
        self.hooks = Hooks(Settings(webhook=urls[0] if urls else None, **settings), self._log)

    def _log(self, event, /, **fields):
        self.lines.append((event, fields))

    @property
    def events(self):
        """The events of the log, in order."""
        return [event for event, _ in self.lines]

    def logged(self, count):
        """Wait until so many lines are logged."""
        until(lambda: len(self.lines) >= count, "a line of the log")
        return self

    def end(self):
        """A stop that waits for all that is queued."""
        self.hooks.close(timeout=PATIENCE)
        return self

    def told(self, view):
        """Begin, and end."""
        self.hooks.begin(view)
        return self.end()


def bad(root, run, step):
    """A save with NaN, and its verdict."""
    import torch

    torch.save({"w": torch.full((64,), float("nan"))}, root / f"net-{step}.pt")
    checked = verify_checkpoint(look(run), look(run).checkpoint(f"net-{step}.pt"))
    assert checked.outcome is Outcome.BAD
    return checked


def steps(listener):
    """The steps of what was posted."""
    return [event["step"] for event in listener.posted]


@pytest.mark.parametrize(
    ("statuses", "tries"),
    [
        *(((status, status, 200), (3, 1)) for status in (500, 503, 429)),
        ((500,), (notify._TRIES, notify._TRIES)),
        *(((status,), (1, 1)) for status in (302, 400, 404)),
    ],
)
def test_what_may_pass_is_tried_again(statuses, tries):
    """A failing server gets an event again, before those that came later, and not forever. A redirect is not followed,
    and a refusal is final."""
    with listening(*statuses) as web:
        telling = Telling(web.url)
        for step in (1, 2):
            telling.hooks.tell(None, {"step": step})
        telling.logged(sum(tries)).end()
    assert steps(web) == [1] * tries[0] + [2] * tries[1]
    delivered = statuses[-1] == 200
    assert telling.events.count("hook_ran") == 2 * delivered
    again = ["again_in_seconds" in fields for _, fields in telling.lines]
    assert again.count(True) == sum(tries) - 2
    assert [fields["level"] for _, fields in telling.lines].count("error") == 2 * (not delivered)


def test_a_verdict_is_told_once_across_restarts(root, run):
    """Who was killed between the verdict and the telling is made up for by the next start, and by no later one."""
    write_torch(root, 100, seed=1)
    with listening() as web:
        Telling(web.url).told(look(run))  # the first start
        bad(root, run, 200)
        assert web.posted == []  # killed now
        Telling(web.url).told(look(run))
        assert steps(web) == [200]
        Telling(web.url).told(look(run))
        assert steps(web) == [200]
        assert web.posted[0]["checkpoint"] == {"path": "net-200.pt", "series": "net-#.pt", "id": "200.1"}
        assert web.posted[0]["findings"][0]["tensor"] == "w"


def test_an_unfinished_newest_save_is_told_once(root, run, monkeypatch):
    """After two of the usual times between saves, also across restarts; where its writer may be elsewhere."""
    monkeypatch.setattr(samples, "writers_are_seen", lambda *_: False)
    now = time.time()
    for step, age in ((100, 520.0), (200, 420.0), (300, 320.0)):
        path = root / write_torch(root, step, seed=step)
        os.truncate(path, path.stat().st_size // (1 + (step == 300)))
        os.utime(path, (now - age, now - age))
    with listening() as web:
        for _ in range(2):
            telling = Telling(web.url)
            watched = WatchedRun(run.url, run.run_id, Settings(), telling.hooks, None)
            for _ in range(3):
                watched.step(Work(scanner=inline))
            telling.end()
            assert [(e["event"], e["cause"], e["step"]) for e in web.posted] == [("unfinished", "unfinished", 300)]
            assert telling.events.count("unfinished") == 1
    assert "net-300.pt, is unfinished" in web.posted[0]["title"]


def test_the_same_event_has_the_same_id_whoever_tells_it(root, run):
    """What the one who found it told, and what is made up for, can be known for one by its receiver."""
    with listening() as web:
        first = Telling(web.url)
        write_torch(root, 100, seed=1)
        first.hooks.begin(look(run))
        live = verdict_event(run, bad(root, run, 200), source="daemon")
        reported = open_incident(run, step=7, cause="numeric", reason="NaN", evidence={}, source="guard")
        first.end()  # killed before it could tell either
        Telling(web.url).told(look(run))
        assert [event["id"] for event in web.posted] == [live["id"], incident_event(run, reported)["id"]]
        assert live["id"].startswith(run.run_id)


def test_what_was_told_live_is_not_told_again(root, run):
    """The note is made when the address has it: not before, and not by another address."""
    write_torch(root, 100, seed=1)
    with listening() as web, listening(404) as deaf:
        for url in (web.url, deaf.url):
            telling = Telling(url)
            telling.hooks.begin(look(run))
            telling.end()
        checked = bad(root, run, 200)
        for url in (web.url, deaf.url):
            telling = Telling(url)
            telling.hooks.tell(run, verdict_event(run, checked, source="daemon"))
            telling.end()
        deaf.statuses[:] = [200]
        for url in (web.url, deaf.url):
            Telling(url).told(look(run))
        assert (steps(web), steps(deaf)) == ([200], [200, 200])


def test_a_command_that_told_leaves_nothing_to_tell(root, run):
    """A verdict that the command line told is not told by the next daemon, nor is what was there before an address."""
    bad(root, run, 100)
    open_incident(run, step=7, cause="numeric", reason="NaN", evidence={}, source="guard")
    with listening() as web:
        telling = Telling(web.url)
        telling.hooks.tell(run, verdict_event(run, bad(root, run, 200), source="cli"))
        telling.end()
        for _ in range(2):
            Telling(web.url).told(look(run))
        assert steps(web) == [200]


def test_an_event_that_a_stop_broke_off_is_told_by_the_next_start(root, run, monkeypatch):
    """A stop does not wait for the next try; nothing is lost by that."""
    write_torch(root, 100, seed=1)
    with listening() as web:
        Telling(web.url).told(look(run))
        checked = bad(root, run, 200)
        monkeypatch.setattr(notify, "_FIRST_PAUSE", 1000.0)
        web.statuses[:] = [500]
        telling = Telling(web.url)
        telling.hooks.tell(run, verdict_event(run, checked, source="daemon"))
        telling.logged(1).hooks.close(timeout=0.0)
        assert "hook_abandoned" in telling.events
        web.statuses[:] = [200]
        assert Telling(web.url).told(look(run)).events == ["hook_ran"]
        assert Telling(web.url).told(look(run)).events == []


def test_a_stop_soon_gives_up_an_address_that_fails(root, run):
    """A command that ends waits for a few tries of one event, and not for those of all; the next start tells them."""
    write_torch(root, 100, seed=1)
    with listening() as web:
        Telling(web.url).told(look(run))
        for step in (200, 300, 400):
            bad(root, run, step)
        web.statuses[:] = [500]
        telling = Telling(web.url)
        telling.hooks._lines[0]._closing.set()
        telling.told(look(run))
        assert steps(web) == [200] * notify._TRIES_AT_END
        web.statuses[:] = [200]
        Telling(web.url).told(look(run))
        assert steps(web)[notify._TRIES_AT_END :] == [200, 300, 400]


def test_a_start_makes_up_for_the_newest_only(root, run, monkeypatch):
    """Who comes back after a long time gets no flood: the newest few, and never the rest."""
    monkeypatch.setattr(notify, "_MOST_SENT_LATE", 2)
    write_torch(root, 100, seed=1)
    with listening() as web:
        Telling(web.url).told(look(run))
        for step in (200, 300, 400, 500):
            bad(root, run, step)
        for _ in range(2):
            Telling(web.url).told(look(run))
        assert steps(web) == [400, 500]


def test_the_incident_of_a_bad_save_is_told_by_its_verdict(root, run):
    """One trouble is one message, also if it is told after a restart."""
    from ckptguard.reporting.open_and_close import record_bad_save

    write_torch(root, 100, seed=1)
    with listening() as web:
        Telling(web.url).told(look(run))
        assert record_bad_save(run, bad(root, run, 200), source="daemon") is not None
        for _ in range(2):
            Telling(web.url).told(look(run))
        assert [event["event"] for event in web.posted] == ["verdict"]


def test_records_that_cannot_be_had_hold_nothing_up(root, run, monkeypatch):
    """What is found now is told all the same, and nothing is raised."""

    def refuse(*_):
        raise RecordsError("no")

    write_torch(root, 100, seed=1)
    monkeypatch.setattr(notify, "read_notified", refuse)
    monkeypatch.setattr(notify, "mark_notified", refuse)
    monkeypatch.setattr(events, "series_names", refuse)
    with listening() as web:
        telling = Telling(web.url)
        telling.hooks.begin(look(run))
        telling.hooks.tell(run, verdict_event(run, bad(root, run, 200), source="daemon"))
        telling.end()
        assert steps(web) == [200]
    assert telling.events == ["hook_records", "hook_ran", "hook_records"]


def test_nothing_is_written_where_nobody_is_told(root, run, tmp_path):
    """Without an address there are no notes; in a run without saves there never are."""
    write_torch(root, 100, seed=1)
    Telling().told(look(run))
    assert list_records(run, "told", recursive=True) == []
    empty = begin_run(str(tmp_path / "empty"))
    with listening() as web:
        Telling(web.url).told(look(empty))
    assert list((tmp_path / "empty").iterdir()) == []


@needs_apprise
def test_records_hold_no_address(root, run):
    """What is noted is a digest, and not even that of a password."""
    write_torch(root, 100, seed=1)
    with listening() as web:
        Telling(web.url, notify=(web.address,)).told(look(run))
    names = list_records(run, "told", recursive=True)
    assert len(names) == len(Settings(webhook=web.url, notify=(web.address,)).notify) + 1
    text = str(names) + "".join(p.read_text() for p in (root / "_ckptguard" / "told").rglob("*.json"))
    assert not [secret for secret in (*SECRETS, "127.0.0.1") if secret in text]
    one, other = (channels_of(Settings(notify=(f"mailto://me:{word}@x.org",)))[0].key for word in ("a", "b"))
    assert one == other


@needs_apprise
@quiet
def test_apprise_delivers_and_is_tried_again():
    """A message with a title and words, after a failure too."""
    with listening(500, 200) as web:
        telling = Telling(notify=(web.address,))
        telling.hooks.tell(None, trial_event(None))
        telling.end()
    assert [(m["title"], m["type"]) for m in web.posted] == [("ckptguard: this is a test", "info")] * 2
    assert telling.events == ["hook_failed", "hook_ran"]


@needs_apprise
@quiet
def test_logs_hold_no_secret(caplog):
    """Whatever a service or a server says of the address, the log has nothing of it."""
    with listening(401) as web:
        addresses = (web.address, "json://someone:s3cr3t-pass@127.0.0.1:1/s3cr3t", "nosuch://s3cr3t", "slack://s3cr3t")
        telling = Telling(f"http://someone:s3cr3t@127.0.0.1:{web.url.split(':')[2]}?s3cr3t", notify=addresses)
        telling.hooks.tell(None, trial_event(None))
        telling.end()
    assert telling.events.count("hook_failed") >= 5
    for text in (repr(telling.lines), caplog.text, repr(Settings(webhook=web.url + "/s3cr3t", notify=addresses))):
        assert not [secret for secret in SECRETS if secret in text]
    assert len({fields["to"] for _, fields in telling.lines}) == 5  # and yet it is clear which one is meant


def test_a_login_in_an_address_goes_into_the_header():
    """As every client sends it; and no log has it."""
    with listening() as web:
        telling = Telling(web.url.replace("//", "//someone:s3cr3t%2Dpass@"))
        telling.hooks.tell(None, {"step": 1})
        telling.end()
    assert (steps(web), telling.events) == ([1], ["hook_ran"])
    assert base64.b64decode(web.logins[0].removeprefix("Basic ")) == b"someone:s3cr3t-pass"
    assert not [secret for secret in (*SECRETS, web.logins[0]) if secret in repr(telling.lines)]


def test_without_the_package_all_else_goes_on(monkeypatch):
    """One line says what to install; the other addresses are told."""
    monkeypatch.setattr(channels.importlib.util, "find_spec", lambda name: None)
    with listening() as web:
        telling = Telling(web.url, notify=("slack://a/b/c",))
        telling.hooks.tell(None, {"step": 1})
        telling.end()
    assert steps(web) == [1]
    assert telling.events == ["hook_missing", "hook_ran"]
    assert 'pip install "ckptguard[notify]"' in telling.lines[0][1]["reason"]


def test_a_service_that_breaks_is_a_failed_try(monkeypatch):
    """Whatever an address makes a channel raise ends no thread of ours."""
    channel = channels_of(Settings(webhook="http://[::1"))[0]
    assert try_out(channel, {"step": 1}).delivered is False
    with listening() as web:
        telling = Telling(web.url)
        real = telling.hooks._lines[0].channel.deliver
        monkeypatch.setattr(
            telling.hooks._lines[0].channel, "deliver", lambda event: 1 / 0 if not event else real(event)
        )
        telling.hooks.tell(None, {})
        telling.hooks.tell(None, {"step": 2})
        telling.end()
    assert (steps(web), telling.events) == ([2], ["hook_failed", "hook_ran"])


def test_slack_gets_its_own_kind_of_body(monkeypatch):
    """A webhook of Slack's is recognised by its address; its marks in our text are none."""
    with listening() as web:
        monkeypatch.setattr(channels, "_SLACK_HOSTS", (web.url,))
        assert try_out(channels_of(Settings(webhook=web.url))[0], {"title": "a & b", "text": "<!channel>"}).delivered
    assert web.posted == [{"text": "*a &amp; b*\n&lt;!channel&gt;"}]
    assert channels.WebhookChannel("https://hooks.slack.com/services/T/B/x").shown == "https://***"


def test_nobody_is_called_by_the_name_of_a_tensor(run):
    """Names come from files: a chat finds no mark in them that calls a whole channel."""
    finding = Finding("finite", Severity.ERROR, "1 NaN <!channel>", tensor="@everyone\n<@U1> \x1b[31m")
    checked = Checked(
        path="<!here>/@all", series="s", layout="file", step=1, id=None, outcome=Outcome.BAD, digest_origin=None,
        bytes=1, seconds=None, findings=(finding,),
    )  # fmt: skip
    told = [verdict_event(run, checked, source="daemon"), replica_event(run, "s3://@here", "<!here>", source="daemon")]
    reported = open_incident(run, step=1, cause="@all", reason="<!here> " + "x" * 9000, evidence={}, source="guard")
    for event in (*told, incident_event(run, reported)):
        words = event["title"] + event["text"]
        assert not set("@<\x1b") & set(words)
        assert len(words) < 1500
        assert event["title"].count("\n") == 0
        json.dumps(event)


def test_messages_say_what_happened_and_what_to_do_next(root, run):
    """With the run and its labels, and a command that can be pasted. Nobody is called by a label."""
    checked = bad(root, run, 200)
    event = verdict_event(run, checked, source="daemon")
    assert event["title"] == "ckptguard: run: net-200.pt is bad"
    assert event["text"].splitlines()[1:] == [f"Run: {run.url}", f"Next: ckptguard incident {run.url}"]
    assert event["labels"] == trial_event(None)["labels"] == {}
    labelled = verdict_event(open_run(run.url, Settings(team="vision", owner="<@ann>")), checked, source="daemon")
    assert labelled["labels"] == {"team": "vision", "owner": "<@ann>"}
    assert labelled["text"].splitlines()[2].startswith("Labels: team vision, owner ")
    assert not set("@<") & set(labelled["text"])


def test_a_command_of_another_user_keeps_no_other_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """sudo's process cannot be killed by us. The others are, when this process ends."""
    asked = []

    def refuse(group: int, number: int) -> None:
        asked.append(group)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(channels, "_commands", [SimpleNamespace(pid=10), SimpleNamespace(pid=11)])
    monkeypatch.setattr(channels.os, "killpg", refuse)
    channels.kill_commands()
    assert asked == [10, 11]


def test_what_fell_into_a_silence_is_never_sent(root, run, tmp_path):
    """Not while it lasts, nor after its end, nor by the next start. Other runs are told of, and what comes later is."""
    write_torch(root, 100, seed=1)
    (tmp_path / "other").mkdir()
    other = begin_run(str(tmp_path / "other"))
    with listening() as web:
        Telling(web.url).told(look(run))
        silence_run(run, time.time() + 3600.0, reason="the disk is replaced", by="alice")
        telling = Telling(web.url)
        telling.hooks.tell(run, verdict_event(run, bad(root, run, 200), source="daemon"))
        incident = open_incident(run, step=7, cause="numeric", reason="NaN", evidence={}, source="guard")
        telling.hooks.tell(run, incident_event(run, incident))
        telling.hooks.tell(run, replica_event(run, "s3://x", "no route", source="daemon"))
        telling.hooks.tell(other, replica_event(other, "s3://x", "no route", source="daemon"))
        telling.end()
        assert [event["run"] for event in web.posted] == [other.run_id]
        assert telling.events == ["hook_silenced"] * 3 + ["hook_ran"]
        assert telling.lines[0][1]["by"] == "alice"
        bad(root, run, 300)
        assert Telling(web.url).told(look(run)).events == ["hook_silenced"]
        end_silence(run)
        for _ in range(2):
            assert Telling(web.url).told(look(run)).events == []
        bad(root, run, 400)
        Telling(web.url).told(look(run))
        assert steps(web)[1:] == [400]


def test_a_silence_ends_the_tries_of_a_message(root, run):
    """One that did not arrive so far is not tried again while its run is silenced."""
    write_torch(root, 100, seed=1)
    with listening(500) as web:
        telling = Telling(web.url)
        telling.hooks.begin(look(run))
        noted = telling._log

        def log(event, /, **fields):
            noted(event, **fields)
            if event == "hook_failed":
                silence_run(run, time.time() + 3600.0, reason="", by="alice")

        telling.hooks._lines[0]._log = partial(log, hook="webhook")
        telling.hooks.tell(run, verdict_event(run, bad(root, run, 200), source="daemon"))
        telling.end()
        assert (steps(web), telling.events) == ([200], ["hook_failed", "hook_silenced"])


@pytest.mark.parametrize("data", [b"", b"{", b'{"format":2,"until":1e10,"reason":"","by":"","at":""}'])
def test_a_damaged_record_of_a_silence_holds_no_message_back(root, run, data):
    """A message too many is better than one too few."""
    write_torch(root, 100, seed=1)
    with listening() as web:
        Telling(web.url).told(look(run))
        silence_run(run, time.time() + 3600.0, reason="", by="alice")
        [record] = (root / "_ckptguard" / "silences").iterdir()
        record.write_bytes(data)
        bad(root, run, 200)
        Telling(web.url).told(look(run))
        assert steps(web) == [200]


def test_a_storage_that_hangs_silences_nothing(root, run, tmp_path, monkeypatch):
    """Neither its own run's messages, nor those of others, wait for it."""
    answers = threading.Event()
    monkeypatch.setattr(notify, "silence_now", lambda run: answers.wait())
    monkeypatch.setattr(notify, "_ANSWER", 0.01)
    (tmp_path / "other").mkdir()
    other = begin_run(str(tmp_path / "other"))
    try:
        with listening() as web:
            telling = Telling(web.url)
            for one in (run, other):
                telling.hooks.tell(one, replica_event(one, "s3://x", "no route", source="daemon"))
            telling.end()
            assert [event["run"] for event in web.posted] == [run.run_id, other.run_id]
    finally:
        answers.set()
