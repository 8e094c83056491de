"""What the storage sees of one verification does not depend on how many other checkpoints there are."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
from support.counting_storage import CountingStorage
from support.fleets import done_by, make_fleet, plan_of, step_of
from support.tiny_run import name_of, save

import ckptguard.records.run
from ckptguard.bulk.engine import open_engine
from ckptguard.storage import open_storage


def _opened(requests, *arguments, **how):
    return CountingStorage(open_storage(*arguments, **how), "run", requests)


@pytest.mark.parametrize("counts", [(10, 80)])
def test_requests_of_one_verdict_are_the_same_in_a_long_run(tmp_path, monkeypatch, counts):
    """Listings, reads and writes of one task."""
    found = []
    for count in counts:
        root = make_fleet(tmp_path / str(count), 1, count)
        with open_engine("threads", 1) as engine:
            done_by(engine, plan_of(engine, root))
            save(str(root / "run0"), step_of(count), 7)
            plan = plan_of(engine, root)
            assert [task.path for task in plan.tasks] == [name_of(step_of(count))]
            requests: Counter[str] = Counter()
            with monkeypatch.context() as patch:
                patch.setattr(ckptguard.records.run, "open_storage", functools.partial(_opened, requests))
                done_by(engine, plan)
        found.append(requests)
    few, many = found
    assert few == many
    assert few["run.list"] <= 12
    print(dict(few))
