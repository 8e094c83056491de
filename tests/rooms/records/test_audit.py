"""The audit: one record for each action, whatever it says, and at most so many."""

import pytest
from support.records_on_disk import at, files_of

from ckptguard.records import audit
from ckptguard.records.audit import BEGAN, CUT_SHORT, DONE, begin_action, end_action, list_actions, read_action
from ckptguard.records.run import begin_run
from ckptguard.records.who_and_when import Owner

HOSTILE = ["<img src=x onerror=alert(1)>", "a\x1b[31mb\x00", "\u202egnp.exe", "\ud800", "x" * 10**5, "é" * 1000, ""]


@pytest.fixture
def run(tmp_path):
    """An empty run."""
    return begin_run(tmp_path / "run")


def begin(run, **said):
    """Begin an action."""
    given = {"verb": "pin", "name": "alice", "role": "operator", "arguments": {}, "reason": "why", "plan": "d" * 32}
    return begin_action(run, **{**given, **said})


def test_an_action_is_on_record_before_and_after(run):
    """It is read back as it began, and then as it ended; its own process tells that it goes on."""
    action = begin(run, arguments={"checkpoint": "model-3", "force": False, "step": 3})
    assert list_actions(run) == [action]
    assert (action.state, action.so_far) == (BEGAN, BEGAN)
    ended = end_action(run, action, DONE, ["pinned model-3"])
    assert list_actions(run) == [ended]
    assert (ended.state, ended.result, ended.arguments) == (DONE, ("pinned model-3",), action.arguments)
    assert (ended.began_at, ended.owner) == (action.began_at, action.owner)


def test_an_action_whose_process_has_ended_was_cut_short(run, monkeypatch):
    """What a killed process left is told from what goes on."""
    ours = audit.this_process()
    gone = Owner(host=ours.host, boot_id=ours.boot_id, pid=2**22 - 1, namespace=ours.namespace, started="1")
    monkeypatch.setattr(audit, "this_process", lambda: gone)
    begin(run)
    assert [action.so_far for action in list_actions(run)] == [CUT_SHORT]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_any_text_is_kept_harmless_and_short(run, text):
    """Whatever people and files say, the record is small, can be read, and holds no control character."""
    action = begin(run, name=text, reason=text, arguments={text[:200]: [text, {"deep": text}], "many": [text] * 10**4})
    end_action(run, action, DONE, [text] * 10**4)
    (found,) = list_actions(run)
    assert len(found.reason) <= audit.LONGEST_REASON
    assert len(found.name) <= 100
    assert len(found.result) == 101
    shown = [found.name, found.reason, *found.result]
    assert not any(character < " " or character in "\u202e\ud800" for character in "".join(shown))
    assert max(len(data) for data in files_of(run.records.root).values()) < 2**20


@pytest.mark.parametrize(
    "secret", ["s3://key:hunter2222@bucket/run", "password=hunter2222", "Authorization: Bearer hunter2222"]
)
def test_no_secret_is_on_record(run, secret):
    """What looks like a password is left out, wherever it was said."""
    action = begin(run, name=secret, reason=secret, arguments={"to": secret, "deep": {"x": [secret]}})
    end_action(run, action, "failed", [secret])
    assert list_actions(run)
    assert not any(b"hunter2222" in data for data in files_of(run.records.root).values())


def test_only_the_newest_are_kept(run, monkeypatch):
    """Beyond the limit the oldest go, both halves of each."""
    monkeypatch.setattr(audit, "MOST", 3)
    ended = [end_action(run, begin(run), DONE, []).id for _ in range(5)]
    assert [action.id for action in list_actions(run)] == ended[-3:]
    assert [action.id for action in list_actions(run, most=2)] == ended[-2:]
    assert len(list(at(run.url, "_ckptguard/audit").iterdir())) == 6


def test_a_damaged_record_hides_no_other(run):
    """An end that cannot be read leaves the beginning; a beginning that cannot be read is left out."""
    first, second = begin(run), begin(run)
    end_action(run, first, DONE, [])
    at(run.url, f"_ckptguard/{audit.action_key(first.id, 'ended')}").write_bytes(b"{")
    at(run.url, f"_ckptguard/{audit.action_key(second.id, BEGAN)}").write_bytes(b"\xff")
    at(run.url, "_ckptguard/audit/notes.txt").write_text("mine")
    assert list_actions(run) == [first]
    assert read_action(run, second.id) is None


def test_what_a_newer_version_wrote(run):
    """Fields that are not known are ignored, and a higher format is not taken for this one."""
    action = begin(run)
    place = at(run.url, f"_ckptguard/{audit.action_key(action.id, BEGAN)}")
    place.write_text(place.read_text().replace('{"format":1,', '{"format":1,"colour":"blue",'))
    assert "blue" in place.read_text()
    assert list_actions(run) == [action]
    place.write_text(place.read_text().replace('{"format":1,', '{"format":2,'))
    assert list_actions(run) == []
