"""Presence: what differs from what was read is good by no door until it is read, and is read by those that may."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_run import TINY, WEIGHTS, content, cycle, inline, name_of, poison, rot, save
from support.verdict_entries import ENTRIES, current_verdict_of
from support.verdict_entries import Entry as NamedVerdict
from support.views import look

from ckptguard.decisions.known_good import verdict_name
from ckptguard.errors import ChangedWhileReadError, NoKnownGoodError
from ckptguard.inspect.list_states import survey, undecided
from ckptguard.inspect.show import show
from ckptguard.inspect.status import status
from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records.run import open_run
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.find_known_good import ANY, Wanted, find_known_good, ranked_candidates
from ckptguard.runs.history import History, names_alone
from ckptguard.runs.run_reader import RunMemory
from ckptguard.runs.work import Work
from ckptguard.storage.protocol import Entry
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import File
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint
from ckptguard.verification.read_known_good import read_known_good
from ckptguard.verification.user_decisions import clear

WORK = Work(scanner=inline)
STEPS = (100, 200, 300)
NONE = TINY.changed(keep="none")


def replace(path: Path, data: bytes) -> None:
    """Other bytes by renaming, with the old time."""
    before, beside = path.stat(), path.with_name("tmp-new")
    beside.write_bytes(data)
    os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    beside.replace(path)


def signature(path: Path) -> tuple[int, int, int]:
    """All that a local file system tells of a file."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


class TamperedRun:
    """A run whose files are changed behind the back of its records; what was seen of each file when it was read."""

    def __init__(self, root: Path, keep: str) -> None:
        self.root, self.settings = root, TINY.changed(keep=keep)
        self.read: set[tuple[str, str, tuple[int, int, int]]] = set()
        for step in STEPS:
            save(str(root), step, step)
        self.look_after("pass", 0, 0)

    def weights(self, step: int) -> Path:
        """The file of a step."""
        return self.root / name_of(step) / WEIGHTS

    def look_after(self, what: str, step: int, other: int) -> None:
        """One thing that somebody does to the run."""
        path = self.weights(step) if step else self.root
        before = signature(path)
        if what == "pass":
            cycle(open_run(str(self.root)), self.settings)
        elif what == "read":
            read_known_good(look(str(self.root), self.settings), ANY, WORK)
        elif what in ("poison", "forge"):
            poison(path)
            if what == "forge":  # nothing that we are told differs
                os.utime(path, ns=(before[1], before[1]))
        elif what == "replace":
            replace(path, content(other + 7)[WEIGHTS])
        elif what == "copy":
            shutil.copy2(path, path.with_name("tmp-copy"))
            path.with_name("tmp-copy").replace(path)
        elif what == "touch":
            path.touch()
        elif what == "old time":
            os.utime(path, ns=(0, 10**18))
        else:
            self.weights(other).rename(path.with_name("tmp-other"))
            path.rename(self.weights(other))
            path.with_name("tmp-other").rename(path)
        if what in ("pass", "read"):
            for file in self.root.rglob(WEIGHTS):
                self.read.add((file.name, hashlib.md5(file.read_bytes()).hexdigest(), signature(file)))

    def is_right(self, id, folder: Path) -> bool:
        """Whether what lies there is what was judged, or cannot be told from it without reading."""
        manifest = look(str(self.root)).history.manifest(id)
        [sealed] = [f for f in manifest.files if f.path.endswith(WEIGHTS)]
        file = folder / WEIGHTS
        same = hashlib.md5(file.read_bytes()).hexdigest() == sealed.md5
        return same or (WEIGHTS, sealed.md5, signature(file)) in self.read

    def check(self) -> None:
        """No door calls good what is not what was judged."""
        run = open_run(str(self.root))
        try:
            answer = find_known_good(run)
        except NoKnownGoodError:
            answer = None
        assert status(look(run, memory=RunMemory())).known_good == answer
        assert answer is None or self.is_right(answer.id, Path(answer.path))
        states = survey(look(run, memory=RunMemory()))
        for state in states:
            if state.in_place and state.outcome is Outcome.GOOD and not state.changed:
                assert self.is_right(state.id, self.root / state.path), state
        assert status(look(run, memory=RunMemory())).changed == tuple(s.path for s in states if s.changed)
        listed = [c.path for c in undecided(names_alone(run), look(run).checkpoints)]
        assert listed == sorted(s.path for s in states if s.changed or (s.in_place and s.outcome is Outcome.PENDING))
        for state in states:
            if state.in_place and state.id is not None:
                assert show(str(self.root / state.path), self.settings).changed == state.changed


WHAT = ("pass", "read", "poison", "forge", "replace", "copy", "touch", "old time", "swap")


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    keep=st.sampled_from(["none", "link", "copy"]),
    done=st.lists(st.tuples(st.sampled_from(WHAT), st.sampled_from(STEPS), st.sampled_from(STEPS)), max_size=8),
)
def test_no_door_calls_good_what_was_not_read_so(tmp_path_factory, keep, done):
    """Whatever is done to the files. Only equal size, mtime and inode deceive, for then nothing is told to us (ctime
    would tell of a forged mtime, and of every harmless chmod and link too)."""
    tampered = TamperedRun(tmp_path_factory.mktemp("presence") / "run", keep)
    for what, step, other in done:
        if what == "swap" and step == other:
            continue
        tampered.look_after(what, step, other)
        tampered.check()


@given(
    sealed=st.tuples(*[st.none() | st.integers(1, 2)] * 2, st.none() | st.sampled_from("ab")),
    now=st.tuples(*[st.none() | st.integers(1, 2)] * 2, st.none() | st.sampled_from("ab")),
)
def test_what_nobody_tells_does_not_differ(sealed, now):
    """All that both know must be equal; and something must be known, where anything is."""
    file = File(path="f", size=1, format="", envelope="", mtime_ns=sealed[0], inode=sealed[1], etag=sealed[2])
    entry = Entry(key="f", kind="file", size=1, mtime_ns=now[0], inode=now[1], etag=now[2])
    both = [(a, b) for a, b in zip(sealed, now, strict=True) if a is not None and b is not None]
    manifest = msgspec.defstruct("Some", ["path", "files"])("f", (file,))
    expected = all(a == b for a, b in both) and (bool(both) or sealed == now == (None, None, None))
    assert looks_as_read([entry], manifest) == expected
    assert not looks_as_read([msgspec.structs.replace(entry, size=2)], manifest)
    assert not looks_as_read([], manifest)


def saved(tmp_path: Path, tiny=NONE) -> Path:
    """A run of three good checkpoints."""
    root = tmp_path / "run"
    for step in STEPS:
        save(str(root), step, step)
    cycle(open_run(str(root)), tiny)
    return root


def test_a_run_that_was_copied_is_read_once(tmp_path):
    """With other times and inodes nothing in it is good at first; one pass reads it, the next reads nothing."""
    root, copied = saved(tmp_path), tmp_path / "copied"
    shutil.copytree(root, copied, copy_function=shutil.copyfile)
    run = open_run(str(copied))
    with pytest.raises(NoKnownGoodError):
        find_known_good(run)
    assert [s.changed for s in survey(look(run))] == [True] * 3
    assert len(cycle(run, NONE).checked) == 3
    assert str(find_known_good(run).id) == "300.1"
    assert [s.changed for s in survey(look(run))] == [False] * 3
    assert cycle(run, NONE).checked == ()


def test_who_decides_without_reading_keeps_what_was_seen(tmp_path):
    """A verdict of a person is about what was read last."""
    root = saved(tmp_path)
    (root / name_of(300) / WEIGHTS).touch()
    run = open_run(str(root))
    cycle(run, NONE)
    mark_suspect(look(run), find_known_good(run).id, "odd")
    clear(look(run), "300", reason="not odd")
    assert str(find_known_good(run).id) == "300.1"


def test_damage_that_was_read_is_no_change(tmp_path):
    """A damaged place is read once, and is bad as it lies there; written once more it is changed."""
    root = saved(tmp_path)
    path = root / name_of(300) / WEIGHTS
    rot(str(root), f"{name_of(300)}/{WEIGHTS}")
    path.touch()
    run = open_run(str(root))
    view = look(run, NONE)
    assert verify_checkpoint(view, view.checkpoint(name_of(300)), work=WORK).outcome is Outcome.BAD
    [state] = [s for s in survey(look(run)) if s.path == name_of(300)]
    assert (state.outcome, state.changed) == (Outcome.BAD, False)
    assert cycle(run, NONE).checked == ()
    path.touch()
    [state] = [s for s in survey(look(run)) if s.path == name_of(300)]
    assert (state.outcome, state.changed) == (Outcome.BAD, True)


@pytest.mark.parametrize("when", ["while it is opened", "file by file"])
def test_a_folder_that_is_swapped_away_and_back_is_pending(tmp_path, when):
    """A verdict is about the files that lie there: those of another folder, opened meanwhile, give none."""
    root, url = tmp_path / "run", str(tmp_path / "run")
    save(url, 100, 1)
    save(str(tmp_path / "other"), 100, 2)
    poison(tmp_path / "other" / name_of(100) / WEIGHTS)
    place, aside, other = root / name_of(100), tmp_path / "aside", tmp_path / "other" / name_of(100)

    def swap(to: Path, new: Path) -> None:
        place.rename(to)
        new.rename(place)

    def swapping(storage, keys, options=None, progress=None):
        if options is not None and options.structure_only:
            return inline(storage, keys, options, progress)
        if when == "file by file":
            first = inline(storage, keys[:1], options, progress)
            swap(aside, other)
            rest = inline(storage, keys[1:], options, progress)
            swap(other, aside)
            return msgspec.structs.replace(first, files=(*first.files, *rest.files))
        swap(aside, other)
        found = inline(storage, keys, options, progress)
        swap(other, aside)
        return found

    view = look(url, NONE)
    with pytest.raises(ChangedWhileReadError):
        verify_checkpoint(view, view.checkpoint(name_of(100)), work=Work(scanner=swapping))
    done = reconcile(look(url, NONE), PassNotes(), work=Work(scanner=swapping), assume_quiet=True)
    assert [w.path for w in done.pending] == [name_of(100)]
    assert done.checked == ()
    assert [c.outcome for c in cycle(open_run(url), NONE).checked] == [Outcome.GOOD]


def test_a_run_that_cannot_be_written_still_has_its_answer(tmp_path):
    """What was read and is right is answered, though its verdict cannot be recorded."""
    from ckptguard.errors import DeniedError

    root = saved(tmp_path)
    (root / name_of(300) / WEIGHTS).touch()
    view = look(str(root), NONE)

    def refuse(*_, **__):
        raise DeniedError("read-only", key="x")

    view.run.records.create = refuse
    found = read_known_good(view, ANY, WORK)
    assert found is not None
    assert str(found.id) == "300.1"


@given(st.lists(ENTRIES, max_size=20), st.integers(0, 10**12))
def test_nothing_that_never_was_good_is_ever_chosen(found: list[NamedVerdict], before: int) -> None:
    """Candidates were GOOD at some time, state no step at or above the limit, and come newest first."""
    names = [verdict_name(current_verdict_of(entry)) for entry in found]
    history = History(open_run(str(Path.cwd())), [f"ledger/a/{name}" for name in names])
    chosen = ranked_candidates(history, Wanted(before_step=before))
    was_good = {CheckpointId("a", e[0], e[1]) for e in found if e[3] is Outcome.GOOD}
    assert set(chosen) == {id for id in was_good if id.number is None or id.number < before}
    assert [id.order for id in chosen] == sorted((id.order for id in chosen), reverse=True)
    assert ranked_candidates(history, Wanted(before_step=before, exclude=frozenset(chosen))) == []
