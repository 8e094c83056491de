"""Random faults in trainings of 2 to 4 ranks, mostly on one rank only: all ranks end at the same step with the same
finite state, or with a clear RollbackExhausted, and never go on from a checkpoint that was not GOOD at that moment.
Harmless trouble takes no rank back.
CKPTGUARD_CAMPAIGN=full: 12 sets of processes, in which 71 trainings are struck, most of 11 by kill -9 of a rank; those
are started again by any number of ranks."""

import dataclasses
import json
import os
import random

import pytest
from struck_ranks import Job, train_all
from support.rank_processes import run_ranks
from support.runs import QUICK
from support.training_faults import SAVE_EVERY, TOTAL

from ckptguard.records.pins import counts, list_pins
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import Selection, verify_target

pytestmark = pytest.mark.torch

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
FAULTS = ("gradient", "weight", "buffer", "optimizer", "input", "spike", "scale", "lasting", "asked", "in flight")
AROUND = ("calm", "damaged", "shard", "disk full", "disk full later")
# A masked batch of one rank, two overflows of a healthy scaler, a learning rate of 0 at first, a rotten old checkpoint.
HARMLESS = ("masked", "two skips", "warm-up", "rotten")


def drawn(run, fault, generator, **given):
    """A training and its trouble."""
    fields = {
        "run": run,
        "seed": generator.randrange(1 << 30),
        "kind": generator.choice(("ddp", "ddp", "fsdp2", "fsdp2", "files")),
        "fault": fault,
        "at": generator.randrange(9, 13) if fault == "spike" else generator.randrange(1, TOTAL + 1),
        "rank": generator.randrange(4),
        "around": generator.choice(AROUND),
        "check_every": generator.choice((1, 2, 50)),
        "tells": generator.random() < 0.7,
    }
    if fault == "in flight":
        fields |= {
            "kind": generator.choice(("ddp", "fsdp2")),
            "fault": generator.choice(("gradient", "weight", "asked")),
            "at": SAVE_EVERY * generator.randrange(1, (TOTAL - 1) // SAVE_EVERY + 1) + 1,
            "held": generator.choice(("waited for", "given up")),
            "check_every": 1,
            "around": "calm",
        }
    if fields["kind"] == "files" and fields["around"] == "shard":
        fields["around"] = "damaged"
    return Job(**fields | given)


def harmless():
    """Trainings with trouble that is none."""
    for seed, fault in enumerate(HARMLESS):
        around = "rotten" if fault == "rotten" else "calm"
        yield Job(run=fault.replace(" ", "-"), seed=seed, fault=fault, at=8, rank=1, around=around)


def run_set(folder, jobs, ranks):
    """Train them in one set of processes; what each rank saw of each, and how each process ended."""
    told = [dataclasses.asdict(job) for job in jobs]
    print("\n".join(map(str, told)))
    ended = run_ranks(train_all, str(folder), told, ranks=ranks, timeout=100 + 20 * len(jobs))
    seen = {}
    for job in jobs:
        files = [folder / f"{job.run}.{rank}.seen" for rank in range(ranks)]
        seen[job] = [json.loads(f.read_text().splitlines()[-1]) if f.exists() else None for f in files]
        for file in files:
            file.unlink(missing_ok=True)
    return seen, [code for code, _, _ in ended], "".join(err[-4000:] for _, _, err in ended)


def judge(folder, job, seen, told):
    """What must be true of every training that was not killed."""
    told = f"{job}\n{seen}\n{told}"
    assert all(answer is not None for answer in seen), told
    assert [answer["wrong"] for answer in seen] == [[]] * len(seen), told
    run = open_run(str(folder / job.run))
    assert [pin for pin in list_pins(run) if counts(run, pin)] == [], told
    if job.fault == "lasting":
        assert {answer.get("error") for answer in seen} == {"rollback_exhausted"}, told
        assert os.path.isfile(seen[0]["report"]), told
        return
    assert [answer.get("error") for answer in seen] == [None] * len(seen), told
    assert {answer["step"] for answer in seen} == {TOTAL}, told
    assert len({answer["digest"] for answer in seen}) == 1, told
    assert len({tuple(answer["steps"]) for answer in seen}) == 1, told
    report = verify_target(str(folder / job.run), QUICK, Selection(newest=1))
    assert report.outcome is Outcome.GOOD, told
    assert report.checkpoints[0].step == TOTAL or any(answer["full"] for answer in seen), told


def judge_harmless(folder, job, seen, told):
    """No rank goes back, and no incident is recorded."""
    for answer in seen:
        assert answer is not None, told
        assert answer["steps"] == list(range(1, TOTAL + 1)), f"{job}\n{answer}"
        assert (answer["wrong"], answer["loads"], answer.get("error")) == ([], 0, None), f"{job}\n{answer}"
    assert not (folder / job.run / "_ckptguard" / "incidents").exists(), job


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_all_ranks_end_finite_or_exhausted(tmp_path):
    """Sets of processes: each trains several times and loses a rank in the last one, which the next set resumes."""
    generator = random.Random(7)
    sets = 12 if FULL else 2
    killed, trained, resumed, died = None, 0, 0, 0
    for number in range(sets):
        ranks = generator.choice((2, 3, 4)) if FULL else 2 + number
        faults = generator.sample(FAULTS, 5) if FULL else FAULTS[number::6][:1]
        jobs = [*harmless()] if number == 0 else []
        jobs += [drawn(f"{number}-{n}", fault, generator) for n, fault in enumerate(faults)]
        if killed is not None:
            again = dataclasses.replace(killed, fault="calm", at=0, around="calm", kill_after=0, held="", resumes=True)
            jobs.insert(0, again)
        last = number == sets - 1
        killed = None
        if not last:
            fault, after = generator.choice(("gradient", "asked", "calm")), generator.randrange(1, 40)
            killed = drawn(f"{number}-killed", fault, generator, around="calm", kill_after=after, check_every=1)
            jobs.append(killed)
        seen, codes, told = run_set(tmp_path, jobs, ranks)
        for job in jobs:
            if job is killed and None in seen[job]:
                died += 1
                survivors = [answer for answer in seen[job] if answer is not None]
                assert [a["wrong"] for a in survivors] == [[]] * (ranks - 1), f"{job}\n{survivors}"
                assert all(a.get("error") in ("ranks", "torch") for a in survivors), f"{job}\n{survivors}\n{told}"
                continue
            (judge_harmless if job.fault in HARMLESS else judge)(tmp_path, job, seen[job], told)
            trained, resumed = trained + 1, resumed + job.resumes
        assert sorted(codes) == ([-9] if killed in seen and None in seen[killed] else [0]) + [0] * (ranks - 1), told
    print(f"{trained} trainings ended as they should, {resumed} after a rank had been killed; {died} were killed")
    assert died >= (8 if FULL else 1)
