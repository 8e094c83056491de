"""The machine of `store_machine.py`: a short run here; the long one is spread over processes."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from support.store_machine import StoreMachine
from support.store_model import key_of
from support.tiny_run import SERIES, WEIGHTS, candidates, name_of, rot

from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
EXAMPLES, STEPS = 2000, 50
EACH = 10  # examples of one seed


def play_some(number: int) -> int:
    """So many examples of the long run; how many they were."""
    play(number, EACH, STEPS)
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
                print(f"\r{played} examples of {STEPS} steps in {time.monotonic() - begun:.0f} s", end="", flush=True)
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
