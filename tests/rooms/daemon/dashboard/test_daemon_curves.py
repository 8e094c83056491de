"""The curves of a run as a real daemon answers them, beside a real training whose batch is poisoned."""

import math
import shutil

import torch
from support.daemon_process import until
from support.guards import guard_of
from support.http_documents import assert_like, example


def test_the_poison_appears_and_the_way_back(run, start):
    """NaN, onset, rollback and the batch left out are in the answer, which is as documented. No storage is asked for
    it: it is the same when the run is gone."""
    daemon = start(run)
    status, none_yet = daemon.ask("curves")
    assert (status, none_yet["source"], none_yet["step"], none_yet["rollbacks"]) == (200, None, [], [])
    with guard_of(str(run), torch.nn.Linear(4, 1)) as guard:
        for step, batch in guard.steps(list(range(40)), total=30, save_every=10):
            guard.observe(loss=1.0 / step, grad_norm=math.nan if batch == 16 else 2.0)

    def complete():
        status, answer = daemon.ask("curves")
        assert status == 200
        return answer if answer["rollbacks"] and answer["step"][-1:] == [30] else None

    answer = until(complete, "the whole curve")
    finite = {**answer, "grad_norm": [norm for norm in answer["grad_norm"] if norm != "nan"]}
    assert_like(finite, example("GET /v1/runs/{run}/curves"))
    assert answer["source"] == "the record of the guard"
    assert answer["step"] == [*range(1, 18), *range(11, 31)]
    assert answer["grad_norm"][16] == "nan"
    assert answer["began"] == [0, 17]
    assert answer["skipped"] == [[17, 17]]
    (back,) = answer["rollbacks"]
    assert (back["from"], back["onset"], back["to"]) == (17, 17, 10)
    shutil.move(run, run.parent / "elsewhere")
    assert {**daemon.ask("curves")[1], "as_of": 0} == {**answer, "as_of": 0}
