"""silence: a run is silenced for a time, and whoever looks sees it."""

from __future__ import annotations

import getpass

import pytest

from ckptguard.records.run import open_run
from ckptguard.records.silences import silence_now
from ckptguard.records.who_and_when import this_host


def test_a_run_is_silenced_and_told_of_again(verified, invoke, document):
    """By whom and why is in every document and text about the run, until it ends."""
    code, made = document("silence", verified, "--until", "8h", "--reason", "the disk is replaced")
    assert (code, made["silence"]["reason"]) == (0, "the disk is replaced")
    assert made["silence"]["by"].endswith(f"@{this_host()[0]}")
    assert silence_now(open_run(str(verified))) is not None
    assert document("status", verified)[1]["silence"] == made["silence"]
    shown = " ".join(invoke("status", verified).stdout.split())
    assert f"silenced: until {made['silence']['until']}, by {made['silence']['by']}: the disk is replaced" in shown
    assert "(silenced)" in invoke("status", verified, verified).stdout
    assert "(silenced)" in invoke("fleet", "report", verified.parent).stdout
    assert document("silence", verified, "--end") == (0, {**made, "silence": None})
    assert document("status", verified)[1]["silence"] is None
    assert "(silenced)" not in invoke("status", verified, verified).stdout


def test_a_silence_replaces_the_one_before(verified, document):
    """Also a longer one."""
    document("silence", verified, "--until", "30d")
    later = document("silence", verified, "--until", "1h")[1]["silence"]
    assert document("status", verified)[1]["silence"] == later
    assert len(list((verified / "_ckptguard" / "silences").iterdir())) == 1


def test_a_damaged_record_is_shown_and_can_be_removed(verified, invoke, document):
    """It silences nothing, and `status` says so."""
    document("silence", verified, "--until", "8h")
    [record] = (verified / "_ckptguard" / "silences").iterdir()
    record.write_bytes(b"{")
    assert document("status", verified)[1]["silence"]["until"] is None
    assert "a record that cannot be read: messages are sent" in " ".join(invoke("status", verified).stdout.split())
    assert "(silenced)" not in invoke("status", verified, verified).stdout
    assert invoke("silence", verified, "--end").exit_code == 0
    assert document("status", verified)[1]["silence"] is None


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--until", "8h", "--end"),
        ("--until", "31d"),
        ("--until", "2020-01-01"),
        ("--until", "8h", "--reason", "x" * 1001),
    ],
)
def test_what_cannot_be_meant_is_refused(verified, invoke, words):
    """With one sentence, and nothing is written."""
    assert invoke("silence", verified, *words).exit_code == 2
    assert not (verified / "_ckptguard" / "silences").exists()


def test_only_a_run_with_records_can_be_silenced(verified, invoke, three, tmp_path):
    """Nor can what is not silenced be told of again."""
    (tmp_path / "empty").mkdir()
    for words in ((tmp_path / "absent", "--until", "8h"), (tmp_path / "empty", "--until", "8h"), (verified, "--end")):
        assert invoke("silence", *words).exit_code == 10
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_user_without_a_name_can_silence_a_run(verified, document, monkeypatch):
    """In a container there may be none."""
    monkeypatch.setattr(getpass, "getuser", lambda: {}["nobody"])
    assert document("silence", verified, "--until", "8h")[1]["silence"]["by"].partition("@")[0].isdigit()
