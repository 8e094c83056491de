"""The one law of leases: who may still live is never taken over, who is surely gone is, whatever wall clocks say."""

import datetime
import subprocess
import sys
import time
import uuid
from unittest import mock

import fsspec
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.crashes import gone

from ckptguard.errors import BusyError, SettingsError
from ckptguard.records import leases, who_and_when
from ckptguard.records.leases import (
    Claim,
    Lease,
    TrainingRecord,
    begin_training,
    claim_path,
    end_training,
    holds,
    new_lease,
    release,
    renew,
    surely_gone,
    take,
)
from ckptguard.records.pins import IN_USE, Pin, counts, list_pins
from ckptguard.records.run import open_run
from ckptguard.records.who_and_when import Owner, seen_for, this_process
from ckptguard.runs.run_view import RunView
from ckptguard.upkeep.leftovers import collect_claim, collect_leftovers
from ckptguard.values.settings import Settings

DAY = 86400.0
YEAR = 365 * DAY
HERE = this_process()
OWNERS = {
    "here, alive": HERE,
    "here, ended": gone(),
    "here, its pid is another process's": msgspec.structs.replace(HERE, started="1"),
    "on another machine": Owner(host="another", boot_id="another start", pid=HERE.pid),
    "before a restart": msgspec.structs.replace(HERE, boot_id="the start before"),
    "in a container": msgspec.structs.replace(HERE, namespace="pid:[1]"),
}
SURELY_ENDED = {"here, ended", "here, its pid is another process's"}
WALL = st.sampled_from([-30 * YEAR, -YEAR, -DAY, 0.0, DAY, YEAR, 30 * YEAR])


@pytest.fixture
def place():
    """A run in memory, emptied afterwards."""
    url = f"memory://leases-{uuid.uuid4().hex[:12]}"
    yield url
    memory = fsspec.filesystem("memory")
    if memory.exists(url):
        memory.rm(url, recursive=True)


def lease_of(kind: str) -> Lease:
    """One of each kind, of this process."""
    here = {"series": "step-#", "step": 1, "generation": 1}
    if kind == "claim":
        return new_lease(Claim, path="step-000000001", **here)
    if kind == "training":
        return new_lease(TrainingRecord, series="step-#", loops=True)
    return new_lease(Pin, lasts=datetime.timedelta(days=1), reason=IN_USE, **here)


class Clocks:
    """The wall clock off by some seconds; this machine's own clock and the storage's, so long after what they say."""

    def __init__(self, wall: float, passed: float, silent: float) -> None:
        real, uptime, storage = time.time, who_and_when._uptime, leases.storage_time

        def on_the_wall() -> float:
            return real() + wall

        def later() -> float:
            return uptime() + passed

        def storage_later(store):
            return storage(store) + int(silent * 1e9)

        self._patches = (
            mock.patch("time.time", on_the_wall),
            mock.patch.object(who_and_when, "_uptime", later),
            mock.patch.object(leases, "storage_time", storage_later),
        )

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.start()

    def __exit__(self, *exc: object) -> None:
        for patch in reversed(self._patches):
            patch.stop()


@pytest.mark.parametrize("kind", ["claim", "training", "pin"])
@pytest.mark.parametrize("whose", OWNERS)
@settings(deadline=None)
@given(
    written=WALL,
    wall=WALL,
    passed=st.sampled_from([0.0, DAY - 60, DAY + 60, 3 * DAY]),
    silent=st.sampled_from([0.0, 840.0, 960.0, 3600.0]),
    noted=st.booleans(),
)
def test_only_who_is_surely_gone_is_taken_over(kind, whose, written, wall, passed, silent, noted):
    """A process of this machine is asked for; one elsewhere is gone when its time has passed, or it was silent for
    long, by clocks that nobody sets."""
    run = open_run(f"memory://leases-{uuid.uuid4().hex}", must_exist=False)
    with Clocks(written, 0.0, 0.0):
        lease = msgspec.structs.replace(lease_of(kind), owner=OWNERS[whose])
    assert take(run, lease)
    if noted:
        seen_for(run, lease.key, note=True)
    with Clocks(wall, passed, silent):
        over = surely_gone(run, lease)
    if whose.startswith("here"):
        expected = whose in SURELY_ENDED
    elif kind == "claim":
        expected = silent > 900
    elif kind == "training":
        expected = False
    else:
        # By its own machine's clock where that is this one's, and else only if this one noted when it saw it.
        expected = (whose == "in a container" or noted) and passed > DAY and wall - written + 1 >= DAY
    assert over is expected, (kind, whose)
    fsspec.filesystem("memory").rm(run.url, recursive=True)


@pytest.mark.parametrize("whose", OWNERS)
def test_what_goes_by_leases_keeps_the_law(place, whose):
    """A claim and a pin of whoever may live stay, and their paths are refused; those of the dead are collected."""
    run = open_run(place, must_exist=False)
    claim, pin = (msgspec.structs.replace(lease_of(kind), owner=OWNERS[whose]) for kind in ("claim", "pin"))
    assert take(run, claim)
    assert take(run, pin)
    run.storage.create("step-000000001/state.json", b"half")
    with pytest.raises(BusyError, match="is being written by process"):
        claim_path(run, path="step-000000001", series="step-#", step=1, generation=1)
    lives = whose not in SURELY_ENDED
    assert counts(run, pin) is lives
    assert collect_claim(run, claim) is not lives
    assert holds(run, claim) is lives
    assert (run.storage.list("step-000000001") != []) is lives
    collect_leftovers(RunView(run, Settings()))
    assert (list_pins(run) == [pin]) is lives


@pytest.mark.parametrize("whose", [who for who in OWNERS if who != "here, alive"])
def test_a_training_follows_the_dead_without_a_word(place, whose):
    """After a restart of this machine too; of whoever may train elsewhere it is told."""
    run = open_run(place, must_exist=False)
    assert take(run, msgspec.structs.replace(lease_of("training"), owner=OWNERS[whose]))
    mine, doubt = begin_training(run, "step-#", loops=True)
    assert (doubt is None) is (whose in SURELY_ENDED or whose == "before a restart")
    assert holds(run, mine)
    end_training(run, mine)
    assert not holds(run, mine)


def test_a_living_training_is_never_followed(place):
    """Another process of this machine: refused, and its record stays."""
    run = open_run(place, must_exist=False)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = msgspec.structs.replace(HERE, pid=process.pid, started=who_and_when._state(process.pid)[1])
        lease = msgspec.structs.replace(lease_of("training"), owner=owner)
        assert take(run, lease)
        with pytest.raises(SettingsError, match=f"process {process.pid} is already training"):
            begin_training(run, "step-#", loops=True)
        assert holds(run, lease)
        process.kill()
    assert begin_training(run, "step-#", loops=True)[1] is None


@pytest.mark.parametrize("kind", ["claim", "training"])
def test_of_several_one_holds_it_and_only_its_owner_gives_it_up(place, kind):
    """Taking again what one holds is no conflict: the first answer may have been lost."""
    run = open_run(place, must_exist=False)
    first, second = lease_of(kind), lease_of(kind)
    assert take(run, first)
    assert take(run, first)
    assert not take(run, second)
    release(run, second)
    assert holds(run, first)
    renew(run, first)
    assert holds(run, first)
    release(run, first)
    release(run, first)
    assert take(run, second)


def test_a_claim_that_was_sealed_takes_no_later_one_with_it(place):
    """Who collects a dead claim that another process has collected already leaves the new writer's alone."""
    run = open_run(place, must_exist=False)
    dead = msgspec.structs.replace(lease_of("claim"), owner=gone())
    living = lease_of("claim")
    assert take(run, living)
    assert collect_claim(run, dead) is False
    assert holds(run, living)


@pytest.mark.parametrize("kind", ["claim", "training", "pin"])
def test_records_of_older_versions_are_read(kind):
    """Claims and trainings said neither `until` nor `uptime`."""
    lease = lease_of(kind)
    fields = msgspec.to_builtins(lease)
    for name in ("until", "uptime"):
        fields.pop(name)
    assert msgspec.json.decode(msgspec.json.encode(fields), type=type(lease)).token == lease.token
