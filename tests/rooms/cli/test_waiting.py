"""A store that does not answer is told of: once, on a terminal, and never in a document."""

from __future__ import annotations

import pytest

from ckptguard.cli import waiting
from ckptguard.storage import retries
from ckptguard.storage.retries import Retries


def test_a_request_is_known_while_it_waits_for_its_answer():
    """From its first attempt to its end, also if that is an error."""
    seen = []
    with pytest.raises(KeyError):
        Retries().run("key", lambda: (seen.append(retries.waits_since()), {}["x"]))
    assert seen[0] is not None
    assert retries.waits_since() is None


def test_it_is_told_once(monkeypatch, capsys):
    """The thread ends with what it says."""
    monkeypatch.setattr(waiting, "LONGEST_SILENCE", -1.0)
    Retries().run("key", lambda: waiting.tell_of_wait())
    assert capsys.readouterr().err == "waiting for the storage to answer; Ctrl-C ends it\n"


@pytest.mark.parametrize(
    ("words", "on_terminal", "watches"),
    [
        (["verify", "s3://bucket/run"], True, True),
        (["verify", "s3://bucket/run", "--json"], True, False),
        (["verify", "s3://bucket/run"], False, False),
        (["supervise", "s3://bucket/run", "--", "true"], True, False),
    ],
)
def test_only_who_watches_is_told(monkeypatch, words, on_terminal, watches):
    """No thread is started for anybody else."""
    started = []
    monkeypatch.setattr(waiting.sys.stderr, "isatty", lambda: on_terminal, raising=False)
    monkeypatch.setattr(waiting.threading.Thread, "start", lambda thread: started.append(thread))
    waiting.report_waits(words)
    assert len(started) == watches


def test_only_a_store_lets_people_wait(monkeypatch, invoke):
    """Nothing is looked at for a local path."""
    asked = []
    monkeypatch.setattr(waiting, "report_waits", asked.append)
    for target in ("absent", "memory://nothing-here"):
        assert invoke("verify", target).exit_code == 10
    assert asked == [["verify", "memory://nothing-here"]]
