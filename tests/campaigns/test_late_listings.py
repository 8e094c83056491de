"""A store whose listings are up to five seconds late: what was committed is found in the end, and nothing that is in
use, kept or being written is collected meanwhile."""

from __future__ import annotations

import os
import random
import secrets

import pytest
from support.faulty_storage import FakeClock, LateListing, wrapped
from support.store_model import key_of
from support.tiny_run import TINY, candidates, cycle, files_below, forget, inline, leftovers, name_of, save
from support.views import look

from ckptguard.errors import BusyError, CkptguardError
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.replicas.replicate import replicate
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.work import Work
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.retention_policy import Policy

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
ROUNDS = 100 if FULL else 5
LATEST = 5.0


@pytest.fixture
def url():
    """A run in memory."""
    own = f"memory://late-{secrets.token_hex(6)}"
    yield own
    forget(own)
    forget(f"{own}-replica")


@pytest.mark.campaign
@pytest.mark.timeout(1800 if FULL else 300)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_live_is_collected(url, seed, tmp_path):
    """Saves, passes, prunes, replication and restores under late listings; what is known-good never goes back, except
    to what the listing shows, and is whole. When time has passed all is as it is on any other store."""
    chance, clock, saved = random.Random(seed), FakeClock(), {}
    delays: dict[str, float] = {}
    stores: dict[str, LateListing] = {}

    def late(inner):
        """One view of each place, which all who open it share."""
        if inner.url not in stores:
            stores[inner.url] = LateListing(inner, clock, lambda key: delays.setdefault(key, chance.uniform(0, LATEST)))
        return stores[inner.url]

    with wrapped(late):
        for step in range(100, 100 * ROUNDS + 1, 100):
            saved[step] = save(url, step, step)
            for _ in range(chance.randint(1, 3)):
                act = chance.choice(["pass", "pass", "prune", "replicate", "restore"])
                run, out = open_run(url), tmp_path / f"out-{secrets.token_hex(4)}"
                try:
                    if act == "pass":
                        reconcile(look(run, TINY), PassNotes(), work=Work(scanner=inline), assume_quiet=True)
                    elif act == "prune":
                        prune(look(run), Policy(keep_last=3, keep_good=2), grace=-1.0)
                    elif act == "replicate":
                        replicate(look(run, TINY), f"{url}-replica", work=Work(scanner=inline))
                    else:
                        done = restore(look(run, TINY), str(out), work=Work(scanner=inline))
                        assert files_below(str(out), name_of(done.step)) == saved[done.step]
                except (BusyError, CkptguardError):
                    pass
                for found in candidates(run):
                    place = name_of(found.id.step) if found.in_place else f"_ckptguard/{found.copy.checkpoint_key}"
                    assert files_below(url, place) == saved[found.id.step], (step, act, found.answer)
                clock.advance(chance.uniform(0, 3))
        clock.advance(LATEST + 1)
        reconcile(look(open_run(url), TINY), PassNotes(), work=Work(scanner=inline), assume_quiet=True)
        clock.advance(LATEST + 1)
        assert find_known_good(open_run(url)).step == 100 * ROUNDS
    last = cycle(open_run(url))
    assert last.could_not_tell == ()
    assert str(find_known_good(open_run(url)).id) == f"{100 * ROUNDS}.1"
    assert leftovers(open_run(url)) == []
    good = [key_of(found.id) for found in candidates(open_run(url))]
    assert good[:2] == [(100 * ROUNDS, 1), (100 * (ROUNDS - 1), 1)]
