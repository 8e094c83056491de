"""What a question costs does not depend on how large the fleet is."""

import contextlib

import pytest
from benchmarks.bench_catalogue import asked_of, build

from ckptguard.catalogue.questions import events_after
from ckptguard.catalogue.schema import open_for_reading

NAMES = tuple(asked_of("", 0))
FLEETS = (220, 660)  # runs: more than a question answers with


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The steps of SQLite's machine for each question, by the number of runs."""
    found = {}
    for runs in FLEETS:
        folder = tmp_path_factory.mktemp(f"fleet-{runs}")
        build(str(folder / "catalogue"), runs, 100)
        with contextlib.closing(open_for_reading(str(folder / "catalogue"))) as db:
            last = events_after(db, 0, most=1).last + 100 * runs - 101
            for name, question in asked_of(f"{runs // 4:012x}", last).items():
                counted = [0]

                def count(counted=counted):
                    counted[0] += 1

                db.set_progress_handler(count, 1)
                answer = question(db)
                db.set_progress_handler(None, 1)
                found[name, runs] = counted[0], answer
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_does_not_depend_on_the_other_runs(steps, name):
    """With three times as many runs it is the same, within a tenth, and nothing is left out."""
    (few, some), (many, same) = (steps[name, runs] for runs in FLEETS)
    assert few > 0
    assert many <= 1.1 * few
    assert type(some) is type(same)
    assert some
