"""A catalogue is deleted, damaged, locked or impossible: it is made anew or done without, and nobody is stopped."""

import contextlib
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import threading

import pytest

from ckptguard.catalogue import catalogue as in_use
from ckptguard.catalogue import schema, write
from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.catalogue.questions import events_after, known, summaries, timeline
from ckptguard.catalogue.rows import Event, RunSeen, event_key
from ckptguard.values.run_rows import Generation
from ckptguard.values.run_summary import RunSummary

PATIENCE = 60.0


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


class Told:
    """The sentences that a catalogue told."""

    def __init__(self):
        self.sentences = []
        self._more = threading.Condition()

    def __call__(self, sentence):
        with self._more:
            self.sentences.append(sentence)
            self._more.notify_all()

    def wait_for(self, count):
        """Wait until there are so many."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.sentences) >= count, PATIENCE), self.sentences


@pytest.fixture
def told():
    """What was told."""
    return Told()


@pytest.fixture
def path(tmp_path):
    """Where the catalogue is."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    return str(folder / "catalogue")


@pytest.fixture
def opened(path, told, monkeypatch):
    """Open catalogues at the path, and close them in the end."""
    monkeypatch.setattr(in_use, "_LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(schema, "BUSY_SECONDS", 0.02)
    with contextlib.ExitStack() as left:

        def one():
            catalogue = Catalogue(path, told)
            catalogue.start()
            assert catalogue._tried.wait(PATIENCE)
            left.callback(catalogue.close)
            return catalogue

        yield one


def put(catalogue, *many):
    """Note runs, and wait until they are written."""
    for one in many:
        catalogue.see(one)
    assert catalogue.settle(PATIENCE)


def in_place(catalogue):
    """How many checkpoints each run has, by outcome."""
    return {run: one.checkpoints for run, one in catalogue.ask(summaries).items()}


def test_it_answers_what_was_noted(opened, told):
    """Every question is answered from what was noted, also after a restart."""
    catalogue = opened()
    put(catalogue, seen(count=3), seen("bb", 2))
    for one in (catalogue, opened()):
        ask = one.ask
        assert list(ask(summaries)) == ["aa", "bb"]
        assert ask(summaries)["bb"].bytes == {"bad": 10}
        assert in_place(one) == {"aa": {"bad": 3}, "bb": {"bad": 2}}
        assert len(ask(timeline, "aa").events) == 3
        assert one.digest("aa") == b"d"
        catalogue.close()
    assert told.sentences == []


def test_events_are_replayed_behind_a_number(opened):
    """A reader that names the last event it saw gets those after it, once each."""
    catalogue = opened()
    put(catalogue, seen(count=3))
    first = catalogue.ask(events_after, 0, most=2)
    put(catalogue, seen(count=5))
    rest = catalogue.ask(events_after, first.last)
    assert [e.event.about for e in (*first.events, *rest.events)] == [f"m/{n:012d}.1" for n in range(5)]
    assert catalogue.ask(events_after, rest.last).events == ()
    assert catalogue.ask(events_after, rest.last).last == rest.last
    assert not rest.reset
    put(catalogue, seen(count=5, digest=b"e"))  # nothing of it is new
    assert catalogue.ask(events_after, 0, most=0).last == rest.last


def test_only_the_newest_events_stay(opened, monkeypatch):
    """Of each run, and of those without a record. A reader that is behind what had to go begins anew."""
    catalogue = opened()
    monkeypatch.setattr(write, "MOST_EVENTS", 10)
    put(catalogue, seen("aa", 20), seen("bb", 4))
    begun = catalogue.ask(events_after, 0).events
    for number in range(30):
        event = Event(key=event_key("replica", str(number)), kind="replica", at=1.0, about=f"{number}")
        catalogue.happened("aa", event)
    assert catalogue.settle(100)
    kept = catalogue.ask(events_after, 0).events
    assert kept[:24] == begun
    assert [event.event.about for event in kept[24:]] == [f"{number}" for number in range(20, 30)]
    assert catalogue.ask(events_after, begun[-1].number).reset
    assert not catalogue.ask(events_after, kept[24].number).reset
    put(catalogue, seen("aa", 20, digest=b"f"))  # what is on record is not told again
    assert catalogue.ask(events_after, 0).events == kept


def test_a_deleted_one_is_made_anew(opened, path, told):
    """It may be deleted while it is in use: digests say what to note again, and old event numbers mean a reset."""
    catalogue = opened()
    put(catalogue, seen(count=2))
    last = catalogue.ask(events_after, 0).last
    for lost in (("",), ("-wal",), ("", "-wal", "-shm"), ("-shm", "-wal")):
        for suffix in lost:
            os.unlink(path + suffix)
        put(catalogue, seen("bb"))
        assert catalogue.digest("aa") == b""
        put(catalogue, seen(count=2))
        assert catalogue.ask(known, "aa").generations.keys() == {f"m/{n:012d}.1" for n in range(2)}
        page = catalogue.ask(events_after, last)
        assert page.reset
        assert page.last > last
        last = page.last
    assert told.sentences == []


@pytest.mark.parametrize("junk", [b"", b"\0", b"junk" * 5000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_one_is_made_anew(opened, path, junk, told):
    """Whatever lies there instead, the next start makes a whole one."""
    put(before := opened(), seen())
    before.close()
    with open(path, "wb") as file:
        file.write(junk)
    catalogue = opened()
    assert catalogue.digest("aa") == b""
    put(catalogue, seen())
    assert in_place(catalogue) == {"aa": {"bad": 1}}
    assert told.sentences == []


def test_every_flipped_page_is_survived(opened, path):
    """A page of noise in the middle is found on opening, or in use: a question then answers nothing, never wrong
    types or a traceback."""
    put(before := opened(), seen(count=300))
    before.close()
    with open(path, "rb") as file:
        whole = file.read()
    for place in range(0, len(whole), 4096):
        with open(path, "wb") as file:
            file.write(whole[:place] + bytes(b ^ 0x5A for b in whole[place : place + 4096]) + whole[place + 4096 :])
        catalogue = opened()
        catalogue.ask(summaries)
        catalogue.ask(timeline, "aa")
        catalogue.ask(events_after, 0)
        catalogue.see(seen(count=3))
        assert catalogue.settle(PATIENCE)
        catalogue.close()


def test_one_of_another_version_is_made_anew(opened, path):
    """Other tables are not read."""
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE run (id)")
        db.execute("PRAGMA user_version = 7")
    db.close()
    put(catalogue := opened(), seen())
    assert in_place(catalogue) == {"aa": {"bad": 1}}


def test_a_locked_one_is_told_once(opened, path, told):
    """While another process holds it, what comes is dropped, and noted again when it is free."""
    catalogue = opened()
    put(catalogue, seen())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        catalogue.see(seen(count=2, digest=b"e"))
        told.wait_for(1)
        assert catalogue.settle(PATIENCE)
        assert catalogue.digest("aa") != b"e"
        other.execute("ROLLBACK")
    told.wait_for(2)
    assert "locked" in told.sentences[0]
    assert "again" in told.sentences[1]
    assert len(told.sentences) == 2
    put(catalogue, seen(count=2, digest=b"e"))
    assert catalogue.digest("aa") == b"e"


@pytest.mark.parametrize("trouble", ["open to others", "no folder", "a folder", "network"])
def test_none_is_possible(opened, path, told, trouble, monkeypatch):
    """Then it says so once, and answers from memory as long as the process lives."""
    folder = os.path.dirname(path)
    if trouble == "open to others":
        os.chmod(folder, 0o755)
    elif trouble == "no folder":
        os.rmdir(folder)
    elif trouble == "a folder":
        os.makedirs(path + "/below")
    else:
        monkeypatch.setattr(schema, "mount_of", lambda path: ("/", "nfs4"))
    catalogue = opened()
    assert not catalogue.is_in_file
    for n in range(50):
        put(catalogue, seen(count=n))
    assert in_place(catalogue) == {"aa": {"bad": 49}}
    assert len(catalogue.ask(timeline, "aa").events) == 49
    assert catalogue.digest("aa") == b"d"
    assert len(set(told.sentences)) == len(told.sentences) == 1


def test_a_value_that_cannot_be_stored_costs_only_itself(opened, told):
    """It is told, and everything else stays."""
    catalogue = opened()
    put(catalogue, seen())
    rows = (Generation(name="m/000000000001.1", bytes=2**70),)
    catalogue.see(RunSeen(id="cc", digest=b"x", summary=RunSummary(url="/c", name="c"), generations=rows))
    told.wait_for(2)  # that, and that it can be used again
    assert in_place(catalogue)["aa"] == {"bad": 1}
    assert catalogue.digest("aa") == b"d"


def test_a_forgotten_run_is_gone(opened):
    """Its rows and events are removed."""
    catalogue = opened()
    put(catalogue, seen(count=3), seen("bb"), seen("cc"))
    catalogue.keep_only({"bb"})
    assert catalogue.settle(PATIENCE)
    assert in_place(catalogue) == {"bb": {"bad": 1}}
    assert {event.run for event in catalogue.ask(events_after, 0).events} == {"bb"}


_WRITER = """
import itertools, sys
from ckptguard.catalogue.schema import open_for_writing
from ckptguard.catalogue.write import write_run
from ckptguard.catalogue.rows import RunSeen
from ckptguard.values.run_rows import Generation
from ckptguard.values.run_summary import RunSummary
db = open_for_writing(sys.argv[1])
for n in itertools.count(1):
    rows = tuple(Generation(name=f"m/{k:012d}.1", outcome="good", bytes=n) for k in range(n % 50))
    facts = RunSummary(url="/a", name="a", checkpoints={"good": len(rows)}, bytes={"good": n * len(rows)})
    write_run(db, RunSeen(id="aa", digest=b"%d" % n, summary=facts, generations=rows), now=1.0)
    print(n, flush=True)
"""


@pytest.mark.parametrize("after", [1, 2, 7, 40])
def test_a_killed_writer_leaves_whole_rows(path, after):
    """After SIGKILL at any time the digest, the rows and the facts are of one moment."""
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, path], stdout=subprocess.PIPE)
    for _ in itertools.islice(writer.stdout, after):
        pass
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    with contextlib.closing(schema.open_for_writing(path)) as db:
        rows, number = known(db, "aa").generations, int(write.run_digests(db)["aa"])
        assert number >= after
        assert [row.bytes for row in rows.values()] == [number] * (number % 50)
        assert summaries(db)["aa"].bytes == {"good": number * len(rows)}


def test_a_network_file_system_is_known_by_its_mount(monkeypatch, tmp_path):
    """The longest mount above the file decides, also one with a space in its name."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /net\\040home rw - nfs4 host:/x rw\n"
        "3 2 0:3 / /net\\040home/local rw shared:1 - xfs /dev/b rw\n"
    )
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: real(mounts, *a, **k))
    folders = {"/net home/me": "nfs4", "/net home/local": "xfs", "/run": "ext4"}
    assert {folder: schema.mount_of(folder)[1] for folder in folders} == folders
