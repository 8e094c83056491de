"""One run, a trainer that does as it likes with it, and all that we do: what was promised is kept after every action.

What the trainer ever wrote is known by its bytes, and so is what of it is whole and finite. Of the store nothing is
modelled: which generation has which content is read from the digests of its manifest, and compared with those bytes.
A short run here; the long one is spread over processes, for each setting of `keep`, on a file system without reflinks
and on one with them, and in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.crashes import Killed, at_call, die, gone
from support.faulty_storage import Fault, Faults, injected
from support.records_on_disk import files_of
from support.tiny_run import cycle, forget, inline, leftovers
from support.trainer_world import TRAINERS, Content, Disk, Saved, Training, is_of
from support.views import look

from ckptguard.errors import CkptguardError, NoKnownGoodError
from ckptguard.inspect.list_states import survey
from ckptguard.inspect.status import status
from ckptguard.records import leases
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.run import Run, open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, RolledBack, roll_back
from ckptguard.replicas.replicate import replicate
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import Candidate, KnownGood, Wanted, find_known_good, known_good_candidates
from ckptguard.runs.free_space import SHARED, SharedSpace
from ckptguard.runs.history import History, load_history
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint


class TrainerPromises:
    """Which content was sealed under which id, and of each series the newest good one that must come back."""

    url: str
    training: Training
    settings: Settings
    sealed: dict[CheckpointId, Content]
    promised: dict[str, CheckpointId]
    ledger: set[tuple[str, str]]

    def learns(self) -> None:
        """Take over what was sealed: contents that the trainer wrote. What is GOOD of them is whole and finite."""
        history = load_history(self.run())
        knows = self.training.knows
        names = {(series, name) for series, names in history.names.items() for name in names}
        assert self.ledger <= names, "a verdict was lost"
        self.ledger = names
        for series in history.names:
            for id in history.sealed(series):
                if id not in self.sealed:
                    manifest = history.manifest(id)
                    assert manifest is not None
                    found = next((content for content in knows if is_of(manifest, content)), None)
                    assert found is not None, f"{id} was sealed, and the trainer never wrote it"
                    self.sealed[id] = found
            for id, current_verdict in history.current_verdicts(series).items():
                if current_verdict.outcome is Outcome.GOOD:
                    assert knows[self.sealed[id]].is_healthy, f"{id} is GOOD, and {knows[self.sealed[id]]}"

    def answers_are_what_was_judged(self) -> None:
        """Every door that calls something good shows where what was judged lies."""
        run = self.run()
        with contextlib.suppress(NoKnownGoodError):
            self.is_what_was_judged(find_known_good(run), "known-good")
        said = status(self.view()).known_good
        if said is not None:
            self.is_what_was_judged(said, "status")
        for candidate in self.candidates():
            if not candidate.changed:  # else whoever asks for it reads it
                self.is_what_was_judged(candidate.answer, "a candidate")
        for state in survey(self.view()):
            if state.outcome is Outcome.GOOD and state.in_place and not state.changed:
                assert state.id is not None
                lies = self.training.disk.at(state.path)
                assert lies == self.sealed[state.id], f"list: {state.id} is good, and {state.path} is another one"

    def is_what_was_judged(self, answer: KnownGood, door: str) -> None:
        """The bytes where an answer points are those that were judged."""
        place = self.path_of(answer.id)
        if answer.kept:
            copy = read_kept(self.run(), answer.id)
            assert copy is not None, f"{door}: {answer}"
            place = f"_ckptguard/{copy.checkpoint_key}"
        if answer.kept and "://" not in answer.path:
            shown = tuple(sorted(files_of(answer.path).items())) or (("", Path(answer.path).read_bytes()),)
            assert shown == self.sealed[answer.id], f"{door}: {answer}"
        else:
            assert answer.path.endswith(place), f"{door}: {answer}"
        assert self.training.disk.at(place) == self.sealed[answer.id], f"{door}: {answer.id} at {place} is another one"

    def kept_its_promises(self) -> None:
        """What was promised comes back byte for byte, or a newer good one does."""
        for series, id in self.promised.items():
            if not any(self.has_bytes(c) for c in self.candidates(series) if self.keeps(id, c.id)):
                good = self.good(load_history(self.run()), series)
                assert any(self.lies(one) for one in good if self.keeps(id, one)), f"{id} was promised, and is lost"

    def keeps(self, promised: CheckpointId, id: CheckpointId) -> bool:
        """Whether a promise is kept by this one: it is newer, or the same content."""
        return id.order >= promised.order or self.sealed[id] == self.sealed[promised]

    def has_bytes(self, found: Candidate) -> bool:
        """Whether a known-good one is where it is said to be."""
        place = found.manifest.path if found.in_place else f"_ckptguard/{found.copy.checkpoint_key}"  # type: ignore[union-attr]
        return self.training.disk.at(place) == self.sealed[found.id]

    def lies(self, id: CheckpointId) -> bool:
        """Whether its bytes lie in place, by whatever times, or in its kept copy; or in a copy of its series that waits
        for a verdict of its own, for its place was touched."""
        run, history = self.run(), load_history(self.run())
        waiting = [one for one in list_kept(run) if one.series == id.series and not history.has_verdict(one)]
        copies = [read_kept(run, one) for one in (id, *waiting)]
        places = [f"_ckptguard/{c.checkpoint_key}" for c in copies if c is not None and (c.id == id or c.whole)]
        places.append(self.path_of(id))
        return any(self.training.disk.at(place) == self.sealed[id] for place in places)

    def promises_what_is_whole(self) -> None:
        """Promise the newest good one of each series, of those that are whole somewhere."""
        history = load_history(self.run())
        for series in history.names:
            found = next((id for id in self.good(history, series) if self.lies(id)), None)
            if found is not None:
                self.promised[series] = found

    def promises_what_is_left(self) -> None:
        """Before a rollback, promise what keeps a promise instead of what was promised first: that may be gone since
        there are newer ones, and these may be given up."""
        history = load_history(self.run())
        for series, id in self.promised.items():
            kept = [one for one in self.good(history, series) if self.keeps(id, one) and self.lies(one)]
            self.promised[series] = kept[-1] if kept and id not in kept else id

    def promises_less(self) -> None:
        """Hold no promise any more about what was taken back."""
        view = self.view()
        self.promised = {series: id for series, id in self.promised.items() if view.is_good(id)}

    def good(self, history: History, series: str) -> list[CheckpointId]:
        """The good generations of a series, newest first."""
        view = self.view()
        ids = [id for id in history.sealed(series) if view.is_good(id)]
        return sorted(ids, key=lambda id: id.order, reverse=True)

    # What both need.

    def run(self) -> Run:
        """The run, opened as any process opens it."""
        return open_run(self.url)

    def view(self) -> RunView:
        """A fresh look at it."""
        return look(self.run(), self.settings)

    def candidates(self, series: str | None = None) -> list[Candidate]:
        """All that may be called known-good, best first."""
        return list(known_good_candidates(self.view(), Wanted(series=series)))

    def path_of(self, id: CheckpointId) -> str:
        """Where a generation lay."""
        manifest = load_history(self.run()).manifest(id)
        assert manifest is not None
        return manifest.path


OPERATIONS = ("pass", "verify", "prune", "restore", "replicate", "roll back")
WORK = Work(scanner=inline)
CALLS = st.integers(1, 150)
_runs = itertools.count()


class TrainerMachine(TrainerPromises, RuleBasedStateMachine):
    """`keep` is the setting, `memory` says whether the run lies in ``memory://``, `scratch` where else."""

    keep = "auto"
    memory = False
    scratch = "/dev/shm" if os.path.isdir("/dev/shm") else None

    @initialize(trainer=st.sampled_from(TRAINERS))
    def begin(self, trainer) -> None:
        """An empty run. What earlier ones in this process said of the disk, such as that it is full, is forgotten."""
        vars(SHARED).update(vars(SharedSpace()))
        self.folder = tempfile.mkdtemp(prefix="ckptguard-", dir=self.scratch)
        self.url = f"memory://trainer-{os.getpid()}-{next(_runs)}" if self.memory else f"{self.folder}/run"
        self.replica = f"{self.url}-replica"
        disk = Disk(self.url)
        disk.write("training.log", b"begun")
        self.training = Training(trainer, disk)
        self.settings = Settings(settle=3600.0, scan_interval=1e-3, keep=self.keep, workers=1)
        self.notes = PassNotes()
        self.sealed: dict[CheckpointId, Content] = {}
        self.promised: dict[str, CheckpointId] = {}
        self.ledger: set[tuple[str, str]] = set()
        self.goes_on(2)

    def teardown(self) -> None:
        """A healthy cycle at the end: what was promised comes back, and nothing is left behind."""
        if not hasattr(self, "training"):
            return
        try:
            if sys.exc_info()[0] is None:
                cycle(self.run(), self.settings)
                self.holds()
                self.comes_back()
                assert [key for key in leftovers(self.run()) if not self.training.wrote(key)] == []
        finally:
            forget(self.url)
            forget(self.replica)
            shutil.rmtree(self.folder, ignore_errors=True)

    # What the trainer does.

    @rule(again=st.booleans())
    def saves(self, again: bool) -> None:
        """A save."""
        self.acts(lambda: self.training.save(again=again and self.training.step > 0))

    @rule(count=st.integers(1, 3))
    def goes_on(self, count: int) -> None:
        """Training goes on for a while, and a pass is made after each save."""
        for _ in range(count):
            self.saves(again=False)
            self.a_pass(quiet=True, fresh=False)

    @rule(number=st.integers(0, 1))
    def is_killed_in_a_save(self, number: int) -> None:
        """The trainer dies half-way in one of the files of a save."""
        self.acts(lambda: self.training.save(killed_after=number))

    @rule()
    def is_poisoned(self) -> None:
        """From now on there is a NaN in what is saved."""
        self.training.poisoned = True

    @rule(most=st.integers(1, 3))
    def rotates(self, most: int) -> None:
        """All but the newest numbered ones are removed."""
        self.acts(lambda: [self.training.disk.remove(path) for path in self.training.numbered()[:-most]])

    @rule()
    def deletes_all(self) -> None:
        """Everything that the trainer saved is removed."""
        self.acts(lambda: [self.training.disk.remove(path) for path in self.training.disk.all()])

    @rule()
    def starts_from_scratch(self) -> None:
        """The training is started from scratch, over what lies there."""
        self.training.restart()

    @rule()
    def resumes(self) -> None:
        """The training is started again, and reads what its own resume reads."""
        if not self.training.resume():
            self.training.restart()

    @rule(data=st.data())
    def renames(self, data: st.DataObject) -> None:
        """A user gives a checkpoint the name of another one."""
        lies = sorted(self.training.disk.all())
        if len(lies) > 1:
            one = data.draw(st.sampled_from(lies))
            other = data.draw(st.sampled_from([path for path in lies if path != one]))
            self.acts(lambda: self.training.disk.rename(one, other))

    @rule(data=st.data())
    def copies_over(self, data: st.DataObject) -> None:
        """A user copies a file over another one, as ``cp`` does."""
        lies = self.training.disk.all()
        files = sorted(path for path, content in lies.items() if content[0][0] == "")
        if len(files) > 1:
            one = data.draw(st.sampled_from(files))
            other = data.draw(st.sampled_from([path for path in files if path != one]))
            self.acts(lambda: self.training.disk.write(other, lies[one][0][1]))

    @rule(data=st.data())
    def touches(self, data: st.DataObject) -> None:
        """A file gets another time; where a copy is a link, that looks as if it was written through."""
        lies = self.training.disk.all()
        if lies and not self.memory and self.keep != "link":
            path = data.draw(st.sampled_from(sorted(lies)))
            name = lies[path][0][0]
            self.acts(lambda: self.training.disk.touch(Path(self.url, path, name) if name else Path(self.url, path)))

    def acts(self, act: Callable[[], object]) -> None:
        """The trainer does something. With ``keep = "link"`` what it does reaches the copies, and that was chosen."""
        act()
        for content in self.training.disk.all().values():
            assert content in self.training.knows or self.training.trainer.folders, (
                "the trainer wrote what nobody knows"
            )
        if self.keep == "link":
            self.promised = {series: id for series, id in self.promised.items() if self.lies(id)}

    # What we do.

    @rule(quiet=st.booleans(), fresh=st.booleans())
    def a_pass(self, quiet: bool, fresh: bool) -> None:
        """What a daemon does all the time, with files that are `quiet` for long or were written just now; or one that
        has just been started."""
        self.notes = PassNotes() if fresh else self.notes
        done = reconcile(self.view(), self.notes, work=WORK, assume_quiet=quiet)
        assert done.could_not_tell == (), done
        self.learns()
        self.kept_its_promises()
        self.promises_what_is_whole()

    @rule(data=st.data())
    def verifies(self, data: st.DataObject) -> None:
        """A user verifies a checkpoint: one that is whole and finite, and was saved so, is not BAD."""
        found = self.view().checkpoints
        if found:
            self.verify_one(data.draw(st.sampled_from([c.path for c in found])))

    def verify_one(self, path: str) -> None:
        """Verify what lies under a path."""
        view = self.view()
        checkpoint, lies = view.checkpoint(path), self.training.disk.at(path)
        saved = self.training.knows.get(lies) if lies is not None else None
        if checkpoint is not None:
            checked = verify_checkpoint(view, checkpoint, work=WORK)
            healthy = saved is not None and saved.is_healthy
            # The content of another step under a number of its own is a stale copy.
            name_of, fixed = self.training.trainer.numbered, self.training.trainer.fixed
            own = path in fixed or (saved is not None and name_of is not None and name_of(saved.step) == path)
            assert not (healthy and own and checked.outcome is Outcome.BAD), checked
            assert healthy or checked.outcome is not Outcome.GOOD, checked

    @rule(keep_last=st.sampled_from([1, 2, 4]), drop=st.booleans(), grace=st.sampled_from([-1.0, 86400.0]))
    def prunes(self, keep_last: int, drop: bool, grace: float) -> None:
        """Retention, at once or into the trash."""
        prune(self.view(), Policy(keep_last=keep_last, keep_good=2, drop_failed=drop), grace=grace)

    @rule()
    def comes_back(self) -> None:
        """Restore: something that was judged, byte for byte, where anything was promised."""
        out = f"{self.folder}/out"
        try:
            done = restore(self.view(), out, work=WORK)
        except CkptguardError:
            assert not self.promised, f"{self.promised} cannot be restored"
            return
        finally:
            got = {name: Disk(out).at(name) for name in os.listdir(out)} if os.path.isdir(out) else {}
            shutil.rmtree(out, ignore_errors=True)
        self.learns()
        assert list(got.values()) == [self.sealed[done.id]], f"{done.id} came back as something else"
        assert self.training.knows[self.sealed[done.id]].is_healthy, done

    @rule(data=st.data(), to_one=st.booleans())
    def rolls_back(self, data: st.DataObject, to_one: bool) -> None:
        """Training goes back: every name that its resume reads can be loaded afterwards, or nothing has moved."""
        self.learns()
        self.promises_what_is_left()
        found = sorted({c.id for c in self.candidates()}, key=str)
        to = data.draw(st.sampled_from(found)) if to_one and found else None
        before, done = self.training.disk.all(), None
        with contextlib.suppress(NoKnownGoodError):
            done = self.roll_back(to)
        self.learns()
        if done is None:
            assert self.training.disk.all() == before, "there is nothing to go back to, and files moved"
            return
        known = self.sealed[done.known_good.id]
        assert self.training.disk.at(self.path_of(done.known_good.id)) == known, done
        self.resumes_from_something_good(before, self.training.knows[known])
        self.promises_less()

    def roll_back(self, to: CheckpointId | None = None) -> RolledBack:
        """Go back, to the newest known-good one or to this one."""
        return roll_back(self.view(), GoBack(reason="loss", to_id=to, check_writing=False), work=WORK)

    def resumes_from_something_good(self, before: dict[str, Content], known: Saved) -> None:
        """Every resume name that lay there lies there, and holds what is whole, finite and not newer: it was not saved
        later, or its counter is not higher."""
        lies, knows = self.training.disk.all(), self.training.knows
        for path in self.training.trainer.fixed:
            if path in before:
                assert path in lies, f"{path} is gone: the trainer would start from scratch"
                saved = knows.get(lies[path])
                assert saved is not None, f"{path} holds what nobody ever saved"
                assert saved.is_healthy, f"{path} cannot be resumed from"
                newer = saved.born > known.born and saved.step > known.step
                assert not newer, f"{path} is newer than what was gone back to"
        fixed = self.training.trainer.fixed
        if not fixed or fixed[0] in before:  # else the trainer would have begun from scratch anyhow
            assert self.training.resume(), "the trainer's resume finds nothing that it can load"
            assert not self.training.poisoned, "the trainer resumes from NaN"

    @rule()
    def replicates(self) -> None:
        """What is known-good elsewhere is what was judged."""
        done = replicate(self.view(), self.replica, work=WORK)
        assert done.trouble is None, done
        self.learns()
        for found in known_good_candidates(RunView(open_run(self.replica, must_exist=False), self.settings)):
            if found.in_place and not found.changed:
                content = Disk(self.replica).at(found.manifest.path)
                assert content is not None
                assert is_of(found.manifest, content), f"{found.id} is another one in the replica"
                assert self.training.knows[content].is_healthy, f"{found.id} is good in the replica, and is not"

    # What comes between.

    @rule(number=CALLS, name=st.sampled_from(OPERATIONS))
    def is_killed(self, number: int, name: str) -> None:
        """We die before the n-th call of the storage."""
        self.promises_what_is_left()
        with (
            mock.patch.object(leases, "this_process", gone),
            contextlib.suppress(Killed, CkptguardError),
            at_call(number, die, again=True),
        ):
            self.do(name)
        self.after(name)

    @precondition(lambda self: not self.memory)
    @rule(number=CALLS, name=st.sampled_from(OPERATIONS))
    def has_a_full_disk(self, number: int, name: str) -> None:
        """The disk is full from some call on."""
        self.promises_what_is_left()
        faults = Faults(Fault.ENOSPC, number, forever=True)
        with injected(faults), contextlib.suppress(CkptguardError):
            self.do(name)
        self.after(name)

    @rule(number=CALLS, name=st.sampled_from(OPERATIONS[:-1]), what=st.sampled_from(["save", "rotate", "poisoned"]))
    def is_overtaken(self, number: int, name: str, what: str) -> None:
        """Between two calls of the storage the trainer does something."""

        def between() -> None:
            if what == "rotate":
                self.rotates(most=1)
            else:
                self.training.poisoned = self.training.poisoned or what == "poisoned"
                self.saves(again=False)

        with contextlib.suppress(CkptguardError), at_call(number, between):
            self.do(name)
        self.after(name)

    def do(self, name: str) -> None:
        """One operation, whatever comes out."""
        if name == "pass":
            reconcile(self.view(), self.notes, work=WORK, assume_quiet=True)
        elif name == "verify":
            for checkpoint in self.view().checkpoints:
                verify_checkpoint(self.view(), checkpoint, work=WORK)
        elif name == "prune":
            prune(self.view(), Policy(keep_last=1, keep_good=2), grace=86400.0)
        elif name == "replicate":
            replicate(self.view(), self.replica, work=WORK)
        elif name == "restore":
            try:
                restore(self.view(), f"{self.folder}/dropped", work=WORK)
            finally:
                shutil.rmtree(f"{self.folder}/dropped", ignore_errors=True)
        else:
            self.roll_back()

    def after(self, name: str) -> None:
        """What was broken off: a rollback may have given up newer ones, and nothing else gives up anything."""
        self.learns()
        if name == "roll back":
            history, before = load_history(self.run()), bool(self.promised)
            self.promises_less()
            if before:
                left = [id for series in history.names for id in self.good(history, series) if self.lies(id)]
                assert left, "a rollback that was broken off left nothing good"
        self.kept_its_promises()

    # What must hold.

    @invariant()
    def holds(self) -> None:
        """After every action: nothing bad is called good, and what was promised is there."""
        if hasattr(self, "training"):
            self.learns()
            self.answers_are_what_was_judged()
            self.kept_its_promises()


FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
SEQUENCES, ACTIONS = 2000, 60
EACH = 10  # sequences of one seed
KEEP, PLACES = ("auto", "link", "copy"), ("local", "memory")


def play(number: int, sequences: int, actions: int, *, keep: str, place: str) -> None:
    """Some sequences, other ones for every number. `place`: "local", "memory", or a folder."""
    words = {"keep": keep, "memory": place == "memory"}
    if place not in PLACES:
        words["scratch"] = place
    wanted = settings(
        max_examples=sequences,
        stateful_step_count=actions,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(seed(number)(type("Machine", (TrainerMachine,), words)), settings=wanted)


def play_some(words: tuple[int, str, str]) -> int:
    """So many sequences of the long run; how many they were."""
    number, keep, place = words
    play(number, EACH, ACTIONS, keep=keep, place=place)
    return EACH


def play_all(keep: str, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The long run of one setting in one place."""
    workers, begun, played = max(os.cpu_count() or 1, 2), time.monotonic(), 0
    parts = [(number, keep, place) for number in range(1, SEQUENCES // EACH + 1)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for some in pool.imap_unordered(play_some, parts):  # a violation is told at once
            played += some
            with capsys.disabled():
                took = time.monotonic() - begun
                print(f"\r{keep}, {place}: {played} sequences of {ACTIONS} actions in {took:.0f} s", end="", flush=True)
    assert played == SEQUENCES


@pytest.mark.campaign
@pytest.mark.timeout(14400 if FULL else 300)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keep", KEEP)
def test_whatever_a_trainer_does_the_promises_are_kept(keep, place, capsys):
    """Nothing bad is called good, there is always a good one, and what was gone back to can be resumed from."""
    if FULL:
        play_all(keep, place, capsys)
    else:
        play(1, 2, 20, keep=keep, place=place)


@pytest.fixture
def reflinks(tmp_path):
    """A folder on a file system of its own that makes reflinks, where one can be mounted."""
    image, folder = tmp_path / "xfs.img", tmp_path / "xfs"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)
    try:
        for command in (["mkfs.xfs", "-q", "-m", "reflink=1", image], ["mount", "-o", "loop", image, folder]):
            subprocess.run([str(word) for word in command], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no XFS can be mounted here: {getattr(error, 'stderr', b'') or error!r}")
    yield str(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.campaign
@pytest.mark.timeout(14400 if FULL else 300)
@pytest.mark.parametrize("keep", KEEP)
def test_they_are_kept_where_there_are_reflinks(keep, reflinks, capsys):
    """The same on XFS, where this machine lets it be mounted."""
    if FULL:
        play_all(keep, reflinks, capsys)
    else:
        play(2, 1, 20, keep=keep, place=reflinks)
