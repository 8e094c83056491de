"""A look at a run reads only what changed since the last one, and never tells anything else because of that."""

from __future__ import annotations

import os
import random
import stat
import zlib
from unittest import mock

import msgspec
import pytest
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.served_runs import watched
from support.tiny_run import TINY, delete, forget, inline, name_of, rot, save, truncate
from support.views import look

from benchmarks.bench_known_good import write_run
from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.errors import CkptguardError
from ckptguard.inspect.list_states import survey
from ckptguard.inspect.status import status
from ckptguard.keep.copies import release
from ckptguard.keep.quarantine import mark_suspect, quarantine
from ckptguard.records.kept import list_kept
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.run import Run, open_run
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.retention.pin import pin
from ckptguard.retention.prune import prune
from ckptguard.runs import run_reader
from ckptguard.runs.run_reader import RunMemory
from ckptguard.runs.work import Work
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint
from ckptguard.verification.user_decisions import clear

WORK = Work(scanner=inline)
STEPS = (100, 200, 300, 400, 500)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """This user's runtime folder."""
    place = tmp_path / "runtime"
    place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    return place / "ckptguard"


def opened(call):
    """Which records of manifests and verdicts are opened meanwhile."""
    keys, real = [], LocalStorage.open

    def noting(self, key):
        if key.startswith((f"{MANIFESTS}/", "ledger/")):
            keys.append(key)
        return real(self, key)

    with mock.patch.object(LocalStorage, "open", noting):
        call()
    return keys


def told(run, memo):
    """All that `list` and `status` say, but for what depends on the time, and on others who use the disk."""
    found = status(look(run, memory=memo))
    summary = msgspec.structs.replace(found.summary, training=False, free=None)
    timeless = msgspec.structs.replace(found, known_good_age_seconds=None, at_risk=None, summary=summary)
    return survey(look(run, memory=memo)), timeless


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A run of 400 good checkpoints."""
    root = tmp_path_factory.mktemp("many") / "run"
    root.mkdir()
    write_run(root, 400)
    return str(root)


def test_a_second_look_reads_no_record_of_what_is_unchanged(many):
    """Neither a manifest nor a verdict, of 400."""
    first = opened(lambda: status(look(many)))
    assert len(first) >= 2 * 400
    assert opened(lambda: status(look(many))) == []
    assert opened(lambda: survey(look(many))) == []
    assert len(survey(look(many))) == 400


def test_of_one_change_one_is_read(many, tmp_path):
    """A new verdict is read, and the manifest with it."""
    status(look(many))
    mark_suspect(look(many), survey(look(many))[7].id, "looked odd")
    assert len(opened(lambda: status(look(many)))) == 2
    assert opened(lambda: status(look(many))) == []


def test_kept_copies_are_held_against_what_was_sealed(tmp_path):
    """The second look needs the files of what is kept, and has them."""
    url = str(tmp_path / "run")
    for step in STEPS:
        save(url, step, step)
    reconcile(look(url, TINY), PassNotes(), work=WORK)
    assert {s.kept for s in survey(look(url))} == {True, False}
    assert opened(lambda: told(open_run(url), None)) == []
    assert told(open_run(url), None) == told(open_run(url), RunMemory())


def test_in_memory_alone(many, folder):
    """Who keeps a memo in memory writes no file, and reads none."""
    memo = RunMemory()
    assert len(opened(lambda: status(look(many, memory=memo)))) >= 800
    assert not folder.exists()
    assert opened(lambda: status(look(many, memory=memo))) == []


def test_a_daemon_that_is_started_again_reads_no_record_again(many, folder):
    """It goes on with what the one before it has read; a file of another run, and a damaged one, count for nothing."""
    folder.mkdir()
    folder.chmod(0o700)

    def reads() -> int:
        guarded = watched(many, TINY, feed=CatalogueFeed(Catalogue(str(folder))))
        keys = opened(lambda: survey(guarded.look()))
        guarded.memory.pack()
        return len(keys)

    assert reads() >= 800
    assert reads() == 0
    [file] = folder.glob("*.memo")
    kept, expected = file.read_bytes(), survey(look(many, memory=RunMemory()))
    assert survey(look(many, memory=RunMemory(str(file), "another run"))) == expected
    for damaged in (kept[:-9], b"", zlib.compress(b"\x93"), kept[:40] + bytes([kept[40] ^ 1]) + kept[41:]):
        file.write_bytes(damaged)
        assert reads() >= 800
        assert reads() == 0


def only_file(folder):
    """The one memo that there is."""
    (found,) = folder.glob("states-*.memo")
    return found


def test_what_cannot_be_packed_stays_as_it_is(many):
    """Sizes that a hostile manifest states may add up to more than msgpack holds: no pass over a run ends by that."""
    memo = RunMemory()
    put, rows = RunMemory.put, list[run_reader.ReadRecords]()
    with mock.patch.object(RunMemory, "put", lambda self, row: (rows.append(row), put(self, row))):
        survey(look(many, memory=memo))
    row = rows[0]
    assert row.sealed is not None
    huge = msgspec.structs.replace(row, sealed=msgspec.structs.replace(row.sealed, bytes=2**65))
    memo.put(huge)
    memo.pack()
    assert memo.row(huge.id, huge.stamp) == huge
    memo.put(row)
    memo.pack()
    assert memo.row(row.id, row.stamp) == row


def test_the_file_is_private_and_names_no_run(many, folder):
    """A URL may hold a password."""
    survey(look(many))
    path = only_file(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.path.basename(os.path.dirname(many)).encode() not in path.read_bytes()
    assert not list(folder.glob("*.tmp"))


def _cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def _noise(path):
    path.write_bytes(random.Random(1).randbytes(5000))


def _empty(path):
    path.write_bytes(b"")


def _rewritten(path, place, value):
    stored = msgspec.msgpack.decode(zlib.decompress(path.read_bytes()))
    stored[place] = value
    path.write_bytes(zlib.compress(msgspec.msgpack.encode(stored)))


def _other_version(path):
    _rewritten(path, 0, "9" * len(run_reader.__version__))


def _other_run(path):
    _rewritten(path, 1, "0" * 64)


def _link(path):
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def _fifo(path):
    path.unlink()
    os.mkfifo(path)


def _huge(path):
    with open(path, "ab") as file:
        file.truncate(run_reader._LARGEST + 1)


@pytest.mark.parametrize("spoil", [_cut, _noise, _empty, _other_version, _other_run, _link, _fifo, _huge])
def test_a_file_that_is_none_is_as_if_it_were_not_there(many, folder, spoil):
    """Everything is read, the answer is the same, and the next look has a memo again."""
    expected = survey(look(many, memory=RunMemory()))
    survey(look(many))
    spoil(only_file(folder))
    found = []
    assert len(opened(lambda: found.append(survey(look(many))))) >= 800
    assert found == [expected]
    assert opened(lambda: survey(look(many))) == []


def test_where_none_can_be_written_none_is(many, folder, monkeypatch):
    """A full disk, or a folder that is not ours alone, costs nothing but time."""
    expected = survey(look(many, memory=RunMemory()))
    folder.mkdir()
    folder.chmod(0o755)
    assert survey(look(many)) == expected
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_reader.os, "replace", full)
    assert survey(look(many)) == expected
    assert list(folder.iterdir()) == []


def test_memos_of_many_runs_are_bounded(tmp_path, folder, monkeypatch):
    """Those that were written last stay."""
    monkeypatch.setattr(run_reader, "_MOST_RUNS", 3)
    for number in range(5):
        url = str(tmp_path / f"run-{number}")
        save(url, 100, 100)
        reconcile(look(url, TINY), PassNotes(), work=WORK)
        survey(look(url))
    assert len(list(folder.iterdir())) == 3
    assert opened(lambda: survey(look(url))) == []


def _verify(run: Run, chance: random.Random) -> None:
    view = look(run, TINY)
    for checkpoint in view.checkpoints:
        verify_checkpoint(view, checkpoint, work=WORK)


def _spoil_record(run: Run, chance: random.Random) -> None:
    """A manifest or a verdict is cut, rewritten with as many bytes, removed, or left empty."""
    keys = [e.key for top in (MANIFESTS, "ledger") for e in run.records.list(top, recursive=True)]
    if not keys:
        return
    _spoil(run, chance.choice(sorted(keys)), chance.choice(("half", "other bytes", "nothing", "gone")))


def _spoil(run: Run, key: str, how: str) -> None:
    with run.records.open(key) as reader:
        data = reader.read(0, reader.entry.size)
    run.records.remove(key)
    if how != "gone":
        run.records.create(key, {"half": data[: len(data) // 2], "other bytes": b"?" * len(data), "nothing": b""}[how])


def _records_anew(run: Run, chance: random.Random) -> None:
    for entry in run.records.list(""):
        run.records.remove(entry.key)


def _release(run: Run, chance: random.Random) -> None:
    kept = list_kept(run)
    if kept:
        release(run, chance.choice(kept))


def _some(run: Run, chance: random.Random) -> str | None:
    return chance.choice([c.path for c in look(run).checkpoints] or [None])


def _pin(run: Run, chance: random.Random) -> None:
    view = look(run, TINY)
    if view.checkpoints:
        pin(view, chance.choice(view.checkpoints), note="mine")


def _suspect(run: Run, chance: random.Random) -> None:
    ids = [s.id for s in survey(look(run, memory=RunMemory())) if s.id is not None]
    if ids:
        mark_suspect(look(run), chance.choice(ids), "odd")


@pytest.mark.parametrize("how", ["half", "other bytes", "nothing", "gone"])
@pytest.mark.parametrize("top", [MANIFESTS, "ledger"])
def test_a_record_that_is_not_what_it_was_is_read_again(tmp_path, top, how):
    """By its size, its time or its inode; of a record that is gone, by its name."""
    url = str(tmp_path / "run")
    for step in STEPS[:2]:
        save(url, step, step)
    reconcile(look(url, TINY), PassNotes(), work=WORK)
    memo, run = RunMemory(), open_run(url)
    before = told(run, memo)
    for entry in run.records.list(top, recursive=True):
        _spoil(run, entry.key, how)
    assert told(run, memo) == told(run, RunMemory()) != before


def test_what_an_older_view_saw_is_not_remembered_for_newer_records(tmp_path):
    """The view's history was read before a verdict was added, and the glance lists the records after that."""
    url = str(tmp_path / "run")
    save(url, 100, 100)
    reconcile(look(url, TINY), PassNotes(), work=WORK)
    view, memo = look(url), RunMemory()
    (state,) = survey(look(url, memory=RunMemory()))
    assert view.history.names
    mark_suspect(look(url), state.id, "odd")
    view.memory = memo
    survey(view)
    assert survey(look(url, memory=memo))[0].outcome is Outcome.SUSPECT


OPERATIONS = {
    "save": lambda run, chance: save(run.url, chance.choice(STEPS), chance.randrange(1000)),
    "pass": lambda run, chance: reconcile(look(run, TINY), PassNotes(), work=WORK, assume_quiet=True),
    "verify": _verify,
    "rotate": lambda run, chance: delete(run.url, chance.choice(STEPS)),
    "rot": lambda run, chance: rot(run.url, f"{name_of(chance.choice(STEPS))}/model.safetensors"),
    "truncate": lambda run, chance: truncate(run.url, f"{name_of(chance.choice(STEPS))}/model.safetensors"),
    "roll back": lambda run, chance: roll_back(
        look(run, TINY), GoBack(reason="loss", before_step=chance.choice(STEPS), check_writing=False), work=WORK
    ),
    "quarantine": lambda run, chance: quarantine(look(run, TINY), _some(run, chance) or "none", reason="odd"),
    "suspect": _suspect,
    "clear": lambda run, chance: clear(look(run, TINY), str(chance.choice(STEPS)), reason="it was fine"),
    "prune": lambda run, chance: prune(look(run, TINY), Policy(keep_last=2, keep_good=1), grace=0),
    "pin": _pin,
    "release": _release,
    "spoil a record": _spoil_record,
    "records anew": _records_anew,
}
NUMBERS = iter(range(10**9))


@pytest.mark.parametrize("kind", ["local", "memory"])
@settings(
    max_examples=12,
    phases=[Phase.generate],  # to shrink one takes minutes
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
@given(st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 10**6), st.booleans()), max_size=14))
def test_whatever_happened_it_says_what_it_would_say_without(tmp_path, kind, history):
    """A run's life in any order, with looks in between: by memory and by file, the same as by reading everything."""
    number = next(NUMBERS)
    url = f"memory://memo-{tmp_path.name}-{number}" if kind == "memory" else str(tmp_path / f"run-{number}")
    for step in STEPS[:3]:
        save(url, step, step)
    memo = RunMemory()
    reconcile(look(url, TINY), PassNotes(), work=WORK)
    for name, seed, looks in (("pass", 0, True), *history, ("pass", 0, True)):
        run = open_run(url)
        try:
            OPERATIONS[name](run, random.Random(seed))
        except (CkptguardError, OSError, KeyError):
            pass  # there is nothing to rot, to clear or to go back to
        if looks:
            fresh = told(run, RunMemory())
            memo.pack()
            assert told(run, memo) == fresh
            assert told(run, None) == fresh
    if kind == "memory":
        forget(url)
