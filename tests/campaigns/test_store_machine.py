"""The whole store against a model made of dicts: every operation, damage, crashes and races in any order.

What lies in place is the model's own: it saves, rots and deletes as a trainer and a disk do. Of the store the model
knows which content was sealed under which generation, and which verdicts were given; of both it says what must be
known-good, and what may never be called so. A short run here; the long one is spread over processes.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fsspec
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.crashes import Killed, at_call, die, gone
from support.store_model import ALL, Key, StoreModel, key_of
from support.tiny_run import (
    SERIES,
    TINY,
    WEIGHTS,
    Content,
    candidates,
    cycle,
    delete,
    files_below,
    forget,
    inline,
    leftovers,
    memory_path,
    name_of,
    rot,
    save,
    truncate,
)
from support.views import look

from ckptguard.errors import CkptguardError, NoKnownGoodError, RefusedError
from ckptguard.records import leases
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import ScrubListener, scrub
from ckptguard.replicas.replicate import replicate
from ckptguard.retention.pin import pin, unpin
from ckptguard.retention.prune import _look, prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.runs.work import Work
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint

STEPS = st.sampled_from(ALL)
POLICIES = st.builds(
    Policy,
    keep_last=st.sampled_from([None, 1, 2, 4]),
    keep_every=st.sampled_from([None, 300, 500]),
    keep_good=st.just(2),
    drop_failed=st.booleans(),
)
OPERATIONS = ["pass", "verify", "prune", "restore", "scrub", "repair", "replicate", "roll back"]
Words = tuple[int, Policy, float, int | None]  # a step, a policy, a time of grace, where to go back to
WORDS = st.tuples(STEPS, POLICIES, st.sampled_from([-1.0, 86400.0]), st.sampled_from([None, 300, 500]))
_SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None
_runs = itertools.count()


class StoreMachine(StoreModel, RuleBasedStateMachine):
    """Operations on a run in memory as rules; what must always hold as invariants."""

    @initialize()
    def begin(self) -> None:
        """An empty run."""
        self.url = f"memory://machine-{os.getpid()}-{next(_runs)}"
        fsspec.filesystem("memory").pipe_file(f"{memory_path(self.url)}/training.log", b"begun")  # or there is no run
        self.seeds = itertools.count(1)
        self.sealed: dict[Key, list[Content]] = {}  # what may have been sealed under a generation
        self.outcomes: dict[Key, Outcome] = {}
        self.pinned: set[Key] = set()
        self.ledger: set[str] = set()
        self.scratch = tempfile.mkdtemp(prefix="ckptguard-", dir=_SCRATCH)
        self.half: set[int] = set()  # steps whose save in place did not finish
        self.lain: dict[int, list[Content]] = {}
        self.replica = f"{self.url}-replica"
        for step in (100, 200, 300):
            self.saved(step, whole=True)
        self.a_pass()

    def teardown(self) -> None:
        """A healthy cycle at the end: nothing is left behind, and the known-good one comes back."""
        if not hasattr(self, "url"):
            return
        try:
            with self.passing():
                cycle(self.run_of())
            self.holds()
            self.comes_back()
            assert leftovers(self.run_of()) == []
        finally:
            forget(self.url)
            forget(self.replica)
            shutil.rmtree(self.scratch, ignore_errors=True)

    # What the world does.

    @rule(step=STEPS, whole=st.sampled_from([True, True, True, False]))
    def saved(self, step: int, whole: bool) -> None:
        """The trainer saves, for the first time or again; or dies half-way."""
        save(self.url, step, next(self.seeds))
        self.half.discard(step)
        if not whole:
            truncate(self.url, f"{name_of(step)}/{WEIGHTS}")
            self.half.add(step)
        self.lain.setdefault(step, []).append(files_below(self.url, name_of(step)))

    @rule(count=st.integers(1, 3))
    def goes_on(self, count: int) -> None:
        """Training goes on for a while, all is well, and a pass is made after each save."""
        for _ in range(count):
            newest = max((s for s in ALL if files_below(self.url, name_of(s))), default=0)
            self.saved(min(newest + 100, 900), whole=True)
            self.a_pass()

    @rule(step=STEPS)
    def rotated(self, step: int) -> None:
        """The trainer removes a checkpoint."""
        delete(self.url, step)
        self.half.discard(step)

    @rule(data=st.data())
    def rots(self, data: st.DataObject) -> None:
        """A bit flips, in place or in a kept copy."""
        found = [key for key in files_below(self.url, "") if key.endswith(WEIGHTS) and self.rots_here(key)]
        if found:
            rot(self.url, data.draw(st.sampled_from(sorted(found)), "where"))

    def rots_here(self, key: str) -> bool:
        """Whether rot there can be told from what was saved: what was never read has nothing to be held against, and
        one copy of each is left."""
        top, _, rest = key.partition("/")
        if top.startswith("tmp-"):
            return False
        if top != "_ckptguard":
            step = int(top.removeprefix("model-"))
            return self.current(step) is not None and files_below(self.url, top) in self.contents(step)
        return rest.startswith("kept/") and self.whole_in_place(int(key.split("/")[-2].removeprefix("model-")))

    # What the store does.

    @rule(step=STEPS)
    def verify(self, step: int) -> None:
        """Verify one checkpoint: the model says what must come out."""
        checkpoint = look(self.run_of()).checkpoint(name_of(step))
        if checkpoint is None:
            return
        here, before = files_below(self.url, name_of(step)), self.current(step)
        with self.passing():
            checked = verify_checkpoint(look(self.run_of(), TINY), checkpoint, work=Work(scanner=inline))
        if step in self.half:
            assert checked.outcome in (Outcome.INCOMPLETE, Outcome.BAD), checked
        elif before is not None and here in self.sealed[before]:
            # as when it was last seen whole; one that was found damaged and was mended is good again
            suspect = self.outcomes.get(before) is Outcome.SUSPECT
            assert checked.outcome is (Outcome.SUSPECT if suspect else Outcome.GOOD), checked
        elif before is None:
            assert checked.outcome in (Outcome.GOOD, Outcome.SUSPECT), checked

    @rule()
    def a_pass(self) -> None:
        """What a daemon does all the time."""
        with self.passing():
            reconcile(look(self.run_of(), TINY), PassNotes(), work=Work(scanner=inline), assume_quiet=True)
        self.newest_are_kept()

    @rule(policy=POLICIES, grace=st.sampled_from([-1.0, 0.0, 86400.0]))
    def pruned(self, policy: Policy, grace: float) -> None:
        """Retention: what it may not take, it leaves."""
        stay = self.must_stay()
        before = {step: files_below(self.url, name_of(step)) for step in stay}
        with self.passing():
            prune(look(self.run_of()), policy, grace=grace)
        for step in stay:
            assert files_below(self.url, name_of(step)) == before[step], f"{step} was removed"
            trashed = {mark.step for mark in _look(look(self.run_of()), 1).trash}
            assert self.untrashed(step) or step not in trashed

    @rule(step=STEPS)
    def pin_one(self, step: int) -> None:
        """Somebody pins what lies in place."""
        checkpoint = look(self.run_of()).checkpoint(name_of(step))
        if checkpoint is not None:
            made = pin(look(self.run_of()), checkpoint)[0]
            self.pinned.add((step, made.generation))

    @rule(step=STEPS)
    def unpin_one(self, step: int) -> None:
        """And releases it again."""
        checkpoint = look(self.run_of()).checkpoint(name_of(step))
        if checkpoint is not None:
            with contextlib.suppress(CkptguardError):
                for one in unpin(look(self.run_of()), checkpoint):
                    self.pinned.discard((step, one.generation))

    @rule()
    def comes_back(self) -> None:
        """Restore: the newest that has a whole copy, as it was sealed, or nothing where there is none. A content in
        place that has no verdict yet may get one here, and be what comes back."""
        run, out = self.run_of(), os.path.join(self.scratch, "out")
        known = {key_of(c.id) for c in candidates(run)}
        whole = [key_of(c.id) for c in candidates(run) if self.whole_anywhere(c)]
        done = None
        with self.passing(), contextlib.suppress(NoKnownGoodError, RefusedError):  # what it finds in place is judged
            done = restore(look(run, TINY), out, work=Work(scanner=inline))
        got = {step: files_below(out, name_of(step)) for step in ALL} if os.path.isdir(out) else {}
        shutil.rmtree(out, ignore_errors=True)
        if done is None:
            assert not whole
            return
        key = key_of(done.id)
        assert key == whole[0] if key in known else not whole or key[0] >= whole[0][0], (done, whole)
        assert got[key[0]] in self.sealed[key]

    @rule(before_step=st.sampled_from([None, 300, 500, 800]))
    def rolled_back(self, before_step: int | None) -> None:
        """Training goes back: what it goes back to lies in place, whole."""
        run = self.run_of()
        whole = [key_of(c.id) for c in candidates(run) if self.whole_anywhere(c)]
        with self.passing():
            try:
                back = GoBack(reason="loss", before_step=before_step, check_writing=False)
                done = roll_back(look(run, TINY), back, work=Work(scanner=inline))
            except NoKnownGoodError:
                assert not [key for key in whole if before_step is None or key[0] < before_step]
                return
        assert done.known_good.step is not None
        here = files_below(self.url, name_of(done.known_good.step))
        key = key_of(done.known_good.id)
        assert here in self.sealed[key], done
        self.half &= {s for s in ALL if files_below(self.url, name_of(s))}
        self.half.discard(done.known_good.step)

    @rule()
    def scrubbed_and_repaired(self) -> None:
        """All is read again, and what is damaged is mended where a whole copy of it is."""
        whole = {key_of(c.id) for c in candidates(self.run_of()) if self.whole_anywhere(c)}
        with self.known(whole), self.passing():
            scrub(look(self.run_of(), TINY), watcher=self.watcher(), work=Work(scanner=inline))
            repair(look(self.run_of(), TINY), work=Work(scanner=inline))
        for key in whole:
            if self.current(key[0]) == key and self.has_sizes(key) and key[0] not in self.half:
                assert self.whole_in_place(key[0]), f"{key} was not repaired"

    @rule()
    def replicated(self) -> None:
        """The good ones lie elsewhere, too, the newest generation of each; except one that was saved anew and has no
        verdict since, until it has."""
        found_here = candidates(self.run_of())
        whole = [key_of(c.id) for c in found_here if not c.in_place or self.whole_in_place(c.id.step)]
        newest = {step: max(g for s, g in self.sealed if s == step) for step, _ in self.sealed}
        found_here = [c for c in found_here if key_of(c.id) in whole and self.whole_anywhere(c)]
        whole = [key_of(c.id) for c in found_here if key_of(c.id) in newest.items()]
        with self.passing():
            done = replicate(look(self.run_of(), TINY), self.replica, work=Work(scanner=inline))
        assert done.trouble is None
        there = open_run(self.replica, must_exist=False)
        found = {key_of(c.id): c for c in candidates(there)}
        assert set(whole) <= set(found), (whole, sorted(found), [(c.id, c.done, c.message) for c in done.checkpoints])
        for key, candidate in found.items():
            if candidate.in_place:
                here = files_below(self.replica, name_of(key[0]))  # by its name and sizes: whoever loads it verifies it
                assert here in self.contents(key[0]), f"{key} in the replica"

    def watcher(self) -> ScrubListener:
        """What a scrub does about what it finds in place: verify it."""

        def verify(checkpoint: Any) -> Any:
            return verify_checkpoint(look(self.run_of(), TINY), checkpoint, work=Work(scanner=inline))

        return ScrubListener(verify=verify)

    @contextlib.contextmanager
    def known(self, whole: set[Key]) -> Iterator[None]:
        """What had a whole copy before has one afterwards."""
        yield
        left = {key_of(c.id) for c in candidates(self.run_of()) if self.whole_anywhere(c)}
        assert whole <= left, (whole, left)

    # What comes between.

    @rule(number=st.integers(1, 250), name=st.sampled_from(OPERATIONS), words=WORDS)
    def killed(self, number: int, name: str, words: Words) -> None:
        """An operation dies before its n-th call of the storage."""
        stay = {step for step in self.must_stay() if step in self.half or self.whole_in_place(step)}  # no repair is due
        before = {step: files_below(self.url, name_of(step)) for step in stay}
        with (
            self.passing(sure=False),
            mock.patch.object(leases, "this_process", gone),
            contextlib.suppress(Killed, CkptguardError),
            at_call(number, die, again=True),
        ):
            self.do(name, words)
        if name != "roll back":
            for step in stay:
                assert files_below(self.url, name_of(step)) == before[step], f"{step} was removed"
        else:
            self.half &= {s for s in ALL if files_below(self.url, name_of(s))}

    @rule(
        number=st.integers(1, 250),
        name=st.sampled_from(OPERATIONS[:-1]),
        other=st.sampled_from(["pass", "verify", "prune", "scrub", "repair", "save", "delete"]),
        words=WORDS,
        others=WORDS,
    )
    def raced(self, number: int, name: str, other: str, words: Words, others: Words) -> None:
        """Between two calls of an operation, the trainer or another process does something."""
        step = others[0]

        def between() -> None:
            with self.sealing():
                if other == "save":
                    self.saved(step, whole=True)
                elif other == "delete":
                    self.rotated(step)
                else:
                    with contextlib.suppress(CkptguardError):
                        self.do(other, others)

        pinned = {key for key in self.pinned if self.current(key[0]) == key} - {(step, g) for _, g in self.pinned}
        stay = {step for step in self.must_stay() if step in self.half or self.whole_in_place(step)} - (
            {step} if other in ("save", "delete") else set()
        )
        before = {step: files_below(self.url, name_of(step)) for step in stay}
        with self.passing(sure=False), contextlib.suppress(CkptguardError), at_call(number, between):
            self.do(name, words)
        seen = _look(look(self.run_of()), 1).present
        good = [p.id.step for p in seen if p.outcome is Outcome.GOOD and p.id.step is not None]
        for kept in stay:
            if files_below(self.url, name_of(kept)) != before[kept]:  # newer ones may have got their verdict meanwhile
                assert sum(newer > kept for newer in good) >= TINY.keep_good, f"{kept} was removed"
                assert kept not in {s for s, _ in pinned}, f"{kept} was pinned, and removed"

    def do(self, name: str, words: Words) -> None:
        """One operation, whatever comes out."""
        run, (step, policy, grace, before) = self.run_of(), words
        if name == "pass":
            reconcile(look(run, TINY), PassNotes(), work=Work(scanner=inline), assume_quiet=True)
        elif name == "verify":
            checkpoint = look(run).checkpoint(name_of(step))
            if checkpoint is not None:
                verify_checkpoint(look(run, TINY), checkpoint, work=Work(scanner=inline))
        elif name == "scrub":
            scrub(look(run, TINY), watcher=self.watcher(), work=Work(scanner=inline))
        elif name == "repair":
            repair(look(run, TINY), work=Work(scanner=inline))
        elif name == "replicate":
            replicate(look(run, TINY), self.replica, work=Work(scanner=inline))
        elif name == "prune":
            prune(look(run), policy, grace=grace)
        elif name == "restore":
            out = os.path.join(self.scratch, "dropped")
            try:
                restore(look(run, TINY), out, work=Work(scanner=inline))
            finally:
                shutil.rmtree(out, ignore_errors=True)
        else:
            back = GoBack(reason="loss", before_step=before, check_writing=False)
            roll_back(look(run, TINY), back, work=Work(scanner=inline))

    # What must hold.

    @invariant()
    def holds(self) -> None:
        """What is called known-good was sealed so, lies where it is said to lie, and no verdict is ever lost."""
        if not hasattr(self, "url"):
            return
        run = self.run_of()
        history = load_history(run)
        names = set(history.names.get(SERIES, []))
        assert self.ledger <= names, "a verdict was lost"
        self.ledger = names
        expected = self.known_good(history)
        try:
            said = find_known_good(run)
        except NoKnownGoodError:
            assert expected is None, f"{expected} is known-good, and nothing was found"
            return
        assert expected is not None, said
        assert str(said.id) == f"{expected[0]}.{expected[1]}", (said, expected)
        assert said.path.endswith(name_of(expected[0]))


FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
EXAMPLES, ACTIONS = 2000, 50
EACH = 10  # examples of one seed


def play_some(number: int) -> int:
    """So many examples of the long run; how many they were."""
    play(number, EACH, ACTIONS)
    return EACH


def play(number: int, examples: int, steps: int) -> None:
    """Some examples, other ones for every number."""
    wanted = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    run_state_machine_as_test(seed(number)(StoreMachine), settings=wanted)


@pytest.mark.campaign
@pytest.mark.timeout(7200 if FULL else 300)
def test_the_store_is_what_the_model_says(capsys):
    """Nothing bad is called good, what is good comes back, and nothing that must stay is removed."""
    if not FULL:
        play(1, examples=5, steps=15)
        return
    workers = max(os.cpu_count() or 1, 2)
    begun, played = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for some in pool.imap_unordered(play_some, range(1, EXAMPLES // EACH + 1)):  # a violation is told at once
            played += some
            with capsys.disabled():
                print(
                    f"\r{played} examples of {ACTIONS} actions in {time.monotonic() - begun:.0f} s", end="", flush=True
                )
    assert played == EXAMPLES


@pytest.fixture
def machine():
    """A machine that has begun."""
    made = StoreMachine()
    made.begin()
    yield made
    made.teardown()


def test_a_replica_keeps_the_newer_of_two_contents(machine):
    """Of a step that was saved again, the older content never takes the newer one's place in a replica."""
    for _ in range(3):
        machine.saved(300, whole=True)
        machine.a_pass()
        machine.replicated()
        there = open_run(machine.replica, must_exist=False)
        assert find_known_good(there).id == find_known_good(open_run(machine.url)).id


def test_the_copy_of_what_was_saved_over_is_the_last_of_it(machine):
    """Rot in the only copy of an older generation makes that one BAD, however whole the newer one in place is."""
    machine.saved(300, whole=True)
    machine.a_pass()
    for generation, outcome in ((2, Outcome.GOOD), (1, Outcome.BAD)):
        rot(machine.url, f"_ckptguard/kept/{SERIES}/000000000300.{generation}/{name_of(300)}/{WEIGHTS}")
        machine.scrubbed_and_repaired()
        assert machine.outcomes[300, generation] is outcome
        assert machine.current(300) == (300, 2)
        assert machine.whole_in_place(300)


def test_a_pinned_copy_of_a_content_that_was_saved_over_is_made_anew(machine):
    """A copy that raced with a save is not what was sealed: pinned, it stood for a good one that had no copy."""
    words = (900, Policy(), -1.0, None)
    machine.saved(900, whole=True)
    machine.raced(name="pass", number=14, other="save", words=words, others=words)
    machine.pin_one(900)
    machine.a_pass()
    found = {key_of(c.id): c for c in candidates(open_run(machine.url))}
    assert found[900, 1].copy is not None
    assert found[300, 1].copy is not None
    machine.goes_on(1)
