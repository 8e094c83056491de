"""A catalogue's file is deleted, damaged or impossible: it is made anew or done without, and nobody is stopped."""

import os
import zlib

import msgspec
import pytest

from ckptguard.catalogue import catalogue as in_use
from ckptguard.catalogue.catalogue import MOST_RECENT, Catalogue
from ckptguard.catalogue.rows import Event, RunSeen, event_key
from ckptguard.values.run_rows import Generation
from ckptguard.values.run_summary import RunSummary


def seen(run="aa", count=1, *, digest=b"d"):
    """A run with so many bad checkpoints."""
    rows = tuple(
        Generation(name=f"m/{n:012d}.1", path=f"m-{n}", outcome="bad", judged_at=float(n), bytes=5, in_place=True)
        for n in range(count)
    )
    events = tuple(
        Event(key=event_key("verdict", r.name), kind="verdict", at=r.judged_at, about=r.name, cause="bad") for r in rows
    )
    facts = RunSummary(url=f"/{run}", name=run, checkpoints={"bad": count}, bytes={"bad": 5 * count})
    return RunSeen(id=run, digest=digest, summary=facts, generations=rows, events=events)


@pytest.fixture
def folder(tmp_path):
    """Where the catalogue is."""
    return str(tmp_path)


def names(events):
    """What some numbered events are about."""
    return [one.event.about for one in events]


def test_it_holds_what_was_noted(folder):
    """Also after a restart, with the same numbers."""
    first = Catalogue(folder)
    first.see(seen(count=3))
    first.see(seen("bb", 2))
    again = Catalogue(folder)
    for one in (first, again):
        assert one.summary("bb").bytes == {"bad": 10}
        assert len(one.noted("aa").events) == 3
        assert one.digest("aa") == b"d"
        assert one.is_in_file
    assert again.noted("aa") == first.noted("aa")
    assert again.noted("cc") is None
    assert again.digest("cc") == b""


@pytest.mark.parametrize("in_file", [True, False])
def test_events_are_replayed_behind_a_number(folder, in_file):
    """A reader that names the last event it saw gets those after it, once each, or a reset."""
    catalogue = Catalogue(folder if in_file else None)
    begun = catalogue.newest
    catalogue.see(seen(count=3))
    first = catalogue.events_after(begun)
    assert names(first.events) == [f"m/{n:012d}.1" for n in range(3)]
    catalogue.see(seen(count=5))
    rest = catalogue.events_after(first.last)
    assert names(rest.events) == [f"m/{n:012d}.1" for n in range(3, 5)]
    assert catalogue.events_after(rest.last) == ((), catalogue.newest, False)
    catalogue.see(seen(count=5, digest=b"e"))  # nothing of it is new
    assert catalogue.newest == rest.last
    catalogue.see(seen("bb", MOST_RECENT))
    assert catalogue.events_after(begun).reset
    assert not catalogue.events_after(rest.last).reset
    assert catalogue.events_after(catalogue.newest + 1).reset
    assert catalogue.events_after(0).reset


def test_numbers_grow_over_a_restart(folder, monkeypatch):
    """Also when the clock was put back. A number of the process before is a reset."""
    first = Catalogue(folder)
    first.see(seen(count=3))
    monkeypatch.setattr("time.time", lambda: 5.0)
    again = Catalogue(folder)
    again.see(seen(count=4))
    assert [one.number for one in again.noted("aa").events] == sorted({one.number for one in again.noted("aa").events})
    assert again.newest > first.newest
    assert again.events_after(first.newest - 1).reset


def test_only_the_newest_events_without_a_record_stay(folder, monkeypatch):
    """What is on record stays, and is not told again."""
    monkeypatch.setattr(in_use, "MOST_EVENTS", 10)
    catalogue = Catalogue(folder)
    catalogue.see(seen(count=20))
    for number in range(30):
        event = Event(key=event_key("replica", str(number)), kind="replica", at=1.0, about=f"{number}")
        catalogue.happened("aa", event)
    kept = names(catalogue.noted("aa").events)
    assert kept == [f"m/{n:012d}.1" for n in range(20)] + [f"{number}" for number in range(20, 30)]
    catalogue.see(seen(count=20, digest=b"f"))
    assert names(catalogue.noted("aa").events) == kept
    catalogue.happened("unknown", event)
    assert catalogue.noted("unknown") is None


@pytest.mark.parametrize("loss", ["gone", "empty", "junk", "cut", "another run's", "bomb", "a folder", "a link"])
def test_a_damaged_file_counts_as_none(folder, loss):
    """The next process notes the run again, and the file is whole again if it can be."""
    Catalogue(folder).see(seen(count=300))
    path = os.path.join(folder, "aa.catalogue")
    with open(path, "rb") as file:
        whole = file.read()
    os.unlink(path)
    junk = {"empty": b"", "junk": b"junk" * 5000, "cut": whole[:-9], "bomb": zlib.compress(bytes(1 << 20))}
    if loss in junk:
        with open(path, "wb") as file:
            file.write(junk[loss])
    elif loss == "another run's":
        with open(path, "wb") as file:
            file.write(whole)
        os.rename(path, path := os.path.join(folder, "bb.catalogue"))
        assert Catalogue(folder).noted("bb") is None
    elif loss == "a folder":
        os.makedirs(f"{path}/below")
    elif loss == "a link":
        os.symlink("/dev/zero", path)
    catalogue = Catalogue(folder)
    assert (catalogue.digest("aa"), catalogue.noted("aa")) == (b"", None)
    catalogue.see(seen())
    assert catalogue.noted("aa").generations.keys() == {"m/000000000000.1"}
    assert (Catalogue(folder).noted("aa") is None) == (loss == "a folder")


def test_every_flipped_byte_is_survived(folder):
    """It is never an error, and what is read is what was written."""
    Catalogue(folder).see(seen(count=3))
    path = os.path.join(folder, "aa.catalogue")
    with open(path, "rb") as file:
        whole = file.read()
    for place in range(len(whole)):
        with open(path, "wb") as file:
            file.write(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        noted = Catalogue(folder).noted("aa")
        assert noted is None or len(noted.generations) == 3


def test_one_of_another_version_counts_as_none(folder, monkeypatch):
    """Other releases may have other rows."""
    with monkeypatch.context() as other:
        other.setattr(in_use, "__version__", "0.0")
        Catalogue(folder).see(seen())
    assert Catalogue(folder).noted("aa") is None


def test_a_deleted_file_is_written_again(folder):
    """It may be deleted while it is in use: memory has the rows."""
    catalogue = Catalogue(folder)
    catalogue.see(seen(count=2))
    os.unlink(os.path.join(folder, "aa.catalogue"))
    assert len(catalogue.noted("aa").events) == 2
    catalogue.see(seen(count=3))
    assert len(Catalogue(folder).noted("aa").events) == 3


def test_what_cannot_be_written_is_told_once(folder):
    """Everything is answered from memory, and it is told when it works again."""
    told = []
    gone = os.path.join(folder, "below")
    catalogue = Catalogue(gone, told.append)
    for n in range(1, 5):
        catalogue.see(seen(count=n))
    assert not catalogue.is_in_file
    assert catalogue.summary("aa").checkpoints == {"bad": 4}
    assert len(told) == 1
    os.mkdir(gone)
    catalogue.see(seen(count=5))
    assert catalogue.is_in_file
    assert len(told) == 2
    assert "again" in told[1]


def test_a_forgotten_run_is_gone(folder):
    """Its rows, its events and its file are removed."""
    catalogue = Catalogue(folder)
    begun = catalogue.newest
    for one in (seen(count=3), seen("bb"), seen("cc")):
        catalogue.see(one)
    catalogue.keep_only({"bb"})
    assert {event.run for event in catalogue.events_after(begun).events} == {"bb"}
    assert os.listdir(folder) == ["bb.catalogue"]
    assert catalogue.noted("aa") is None


IN_PLACE, NOWHERE = {"in_place": True}, {"in_place": False}
TRASH, QUARANTINE = ({"in_place": False, "aside": aside} for aside in ("trash", "quarantine"))
PATH = frozenset(["m-0"])


@pytest.mark.parametrize(
    ("course", "told"),
    [
        ([(NOWHERE, ())], ["gone"]),
        ([(TRASH, ())], ["prune"]),
        ([(QUARANTINE, ())], ["quarantine"]),
        ([(NOWHERE, ()), (TRASH, ())], ["prune"]),  # its mark is seen late
        ([(NOWHERE, ()), (QUARANTINE, ()), (QUARANTINE, ())], ["quarantine"]),
        ([(NOWHERE, PATH), (IN_PLACE, PATH)], []),  # it was only touched
        ([(NOWHERE, PATH), (NOWHERE, PATH)], []),  # it was saved over
        ([(NOWHERE, ()), (IN_PLACE, PATH), (NOWHERE, ()), (TRASH, ())], ["gone", "prune"]),
    ],
)
def test_where_a_checkpoint_went_is_said_once_and_right(folder, course, told):
    """Gone is said only of one whose path is empty, and no longer once it is known where it was moved to. Whatever
    changes, those who follow the events learn of it."""
    catalogue = Catalogue(folder)
    catalogue.see(seen())
    before = IN_PLACE
    for where, paths in course:
        row = msgspec.structs.replace(seen().generations[0], **{"aside": "", **where})
        last = catalogue.newest
        catalogue.see(msgspec.structs.replace(seen(), generations=(row,), paths=frozenset(paths)))
        assert (catalogue.newest > last) is (where != before)
        before = where
    moves = [one.event for one in catalogue.noted("aa").events if one.event.kind != "verdict"]
    assert [(event.kind, event.about) for event in moves] == [(kind, "m/000000000000.1") for kind in told]


def test_many_changes_push_out_nothing_that_a_reader_has_missed(folder):
    """Of each run the newest is enough, and who is told of it gets what it is about."""
    catalogue = Catalogue(folder)
    catalogue.see(seen())
    last = catalogue.newest
    catalogue.happened("aa", Event(key=event_key("k"), kind="action", at=1.0, about="x"))
    for number in range(2 * MOST_RECENT):
        row = msgspec.structs.replace(seen().generations[0], pinned=str(number))
        catalogue.see(msgspec.structs.replace(seen(), generations=(row,)))
    page = catalogue.events_after(last)
    assert not page.reset
    assert [one.event.kind for one in page.events] == ["action", "change"]
    assert page.events[-1].number == page.last == catalogue.newest


def test_a_change_is_told_when_it_can_be_asked_for(folder, monkeypatch):
    """Whoever hears of it asks at once."""
    catalogue = Catalogue(folder)
    catalogue.see(seen())
    row = msgspec.structs.replace(seen().generations[0], pinned="mine")
    found = []
    tell = catalogue._tell_of_change
    monkeypatch.setattr(
        catalogue,
        "_tell_of_change",
        lambda *about: (found.append(catalogue.noted("aa").generations[row.name].pinned), tell(*about)),
    )
    catalogue.see(msgspec.structs.replace(seen(), generations=(row,)))
    assert found == ["mine"]
