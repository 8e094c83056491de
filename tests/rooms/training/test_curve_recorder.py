"""The curve of a training is written beside it: nothing waits or fails, and nothing is lost that could be kept."""

import json
import math
import os
import subprocess
import sys
import threading

import msgspec
import pytest
import torch
from support.faulty_storage import Fault, Faults, FaultyStorage
from support.guards import guard_of
from support.records_on_disk import at
from support.views import look

from ckptguard.decisions.thinning import thinned
from ckptguard.records.run import list_records, open_run, read_record
from ckptguard.records.samples import FOLDER, Samples, read_samples, samples_name, superseded, write_samples
from ckptguard.records.who_and_when import dated_name
from ckptguard.storage.local import removal
from ckptguard.training.signals.curve_recorder import CurveRecorder
from ckptguard.upkeep.leftovers import collect_leftovers
from ckptguard.values.curve import MOST_POINTS, Curve, curve_of
from ckptguard.values.ids import RECORDS_FOLDER

LONG = 60.0  # no wait of these tests takes long


@pytest.fixture(params=["local", "memory"])
def run(request, tmp_path):
    """A run without records."""
    if request.param == "memory":
        return open_run(f"memory://{tmp_path.name}-{os.getpid()}", must_exist=False)
    return open_run(str(tmp_path))


def row(step, loss=1.0):
    """An update."""
    return (step, loss, None, None, None)


def train(recorder, first, last):
    """Updates of which some are not finite."""
    recorder.begin()
    for step in range(first, last + 1):
        recorder.append(row(step, math.nan if step % 5 == 0 else float(step)))


def on_record(run):
    """The curve that the records show."""
    return thinned(samples.curve for samples in read_samples(run, list_records(run, FOLDER)).values())


def broken(run, faults):
    """The same run on a storage that fails."""
    return msgspec.structs.replace(run, records=FaultyStorage(run.records, faults))


def test_each_guard_goes_on_with_the_curve_of_the_last(run):
    """Of several trainings one after the other there is one record, with an attempt for each."""
    for first, last in ((1, 30), (21, 40), (31, 50)):
        recorder = CurveRecorder(run)
        train(recorder, first, last)
        recorder.close(LONG)
    (samples,) = read_samples(run, list_records(run, FOLDER)).values()
    assert len(list_records(run, FOLDER)) == 1
    assert samples.curve.step == (*range(1, 31), *range(21, 41), *range(31, 51))
    assert samples.curve.began == (0, 30, 50)


def test_each_write_replaces_the_one_before(run):
    """However often a guard writes, one record of it is there."""
    recorder = CurveRecorder(run)
    for number in range(4):
        recorder.append(row(number))
        recorder.close(LONG)
    assert [name.partition(".")[2] for name in list_records(run, FOLDER)] == ["000004.json"]
    assert on_record(run).step == (0, 1, 2, 3)


@pytest.mark.parametrize("kind", [Fault.EIO, Fault.ENOSPC, Fault.EACCES, Fault.LOST_ANSWER, Fault.TRUNCATED])
def test_any_failure_loses_nothing(run, kind):
    """Whichever request of a write fails: training goes on, and the next write has all of it."""
    earlier = CurveRecorder(run)
    train(earlier, 1, 20)
    earlier.close(LONG)
    for nth in range(1, 60):
        faults = Faults(kind, nth)
        recorder = CurveRecorder(broken(run, faults))
        train(recorder, 20 * nth + 1, 20 * nth + 10)
        recorder.close(LONG)
        train(recorder, 20 * nth + 11, 20 * nth + 20)
        recorder.close(LONG)
        lost = kind is Fault.TRUNCATED and any(operation == "create" for operation, _ in faults.struck)
        if not lost:  # such a store keeps less than it was given, and says nothing
            assert set(on_record(run).step) >= set(range(20 * nth + 1, 20 * nth + 21))
        if not faults.reached:
            break
    else:
        raise AssertionError("there was no end to the requests")
    final = CurveRecorder(run)
    final.append(row(0))
    final.close(LONG)
    if kind is not Fault.TRUNCATED:
        assert set(on_record(run).step) == set(range(20 * (nth + 1) + 1))
        assert len(list_records(run, FOLDER)) == 1


def test_a_storage_that_is_broken_for_good_is_told_of_once(run, caplog):
    """Every request fails, for ever: there is one warning, and no exception."""
    recorder = CurveRecorder(broken(run, Faults(Fault.ENOSPC, 1, forever=True)))
    for number in range(5):
        train(recorder, number, number)
        recorder.close(LONG)
    assert len([r for r in caplog.records if "loss curve" in r.message]) == 1


class Stuck:
    """A storage that does not answer until it is told to."""

    def __init__(self, inner):
        self.inner, self.asked, self.answers = inner, threading.Event(), threading.Event()

    def __getattr__(self, name):
        def wait(*args, **kwargs):
            self.asked.set()
            assert self.answers.wait(LONG)
            return found(*args, **kwargs)

        found = getattr(self.inner, name)
        return wait if callable(found) else found


def test_a_storage_that_hangs_stops_nobody(run):
    """Training goes on while a write hangs, in bounded memory and with one thread; later all of it is written."""
    stuck = Stuck(run.records)
    recorder = CurveRecorder(msgspec.structs.replace(run, records=stuck))
    train(recorder, 1, 10)
    recorder.finish()
    assert stuck.asked.wait(LONG)
    threads = threading.active_count()
    train(recorder, 11, 40_000)
    recorder.close(0.0)
    assert threading.active_count() <= threads
    assert len(recorder._fresh) < 10_000
    stuck.answers.set()
    recorder.close(LONG)
    curve = on_record(run)
    assert len(curve.step) <= MOST_POINTS
    assert (curve.step[0], curve.step[-1]) == (1, 40_000)


def test_a_guard_that_was_replaced_writes_no_more(run):
    """Another guard has taken over the curve: what the first one still has does not come twice."""
    old, new = CurveRecorder(run), CurveRecorder(run)
    train(old, 1, 10)
    old.close(LONG)
    train(new, 11, 20)
    new.close(LONG)
    train(old, 11, 15)
    old.close(LONG)
    assert on_record(run).step == tuple(range(1, 21))
    assert len(list_records(run, FOLDER)) == 1


def test_records_that_were_removed_come_back(run, monkeypatch):
    """A person removed the curves alone: once it is clear that the run stays, the guard writes what it knows."""
    monkeypatch.setattr(removal, "_ALONE", -1.0)
    recorder = CurveRecorder(run)
    train(recorder, 1, 10)
    recorder.close(LONG)
    run.records.remove(FOLDER)
    recorder.append(row(11))
    recorder.close(LONG)
    assert on_record(run).step == tuple(range(1, 12))


def test_a_kill_between_write_and_removal_shows_nothing_twice(run):
    """The records that were taken over are still there: they do not count, and go with the next guard."""
    first = CurveRecorder(run)
    train(first, 1, 10)
    first.close(LONG)
    (before,) = list_records(run, FOLDER)
    text = read_record(run, f"{FOLDER}/{before}")
    second = CurveRecorder(run)
    train(second, 11, 20)
    second.close(LONG)
    run.records.create(f"{FOLDER}/{before}", text)
    assert on_record(run).step == tuple(range(1, 21))
    third = CurveRecorder(run)
    third.append(row(21))
    third.close(LONG)
    assert on_record(run).step == tuple(range(1, 22))
    assert len(list_records(run, FOLDER)) == 1


GOOD = {"step": [1], "loss": [1.0], "grad_norm": [None], "scale": [None], "lr": [None], "began": [0]}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[[[[" * 100_000,
        json.dumps({"format": 2, "curve": GOOD}).encode(),
        json.dumps({"format": 1, "curve": GOOD | {"loss": [1.0, 2.0]}}).encode(),
        json.dumps({"format": 1, "curve": GOOD | {"loss": ["<script>"]}}).encode(),
        json.dumps({"format": 1, "curve": GOOD | {"step": [-1]}}).encode(),
        json.dumps({"format": 1, "curve": GOOD | {"step": [10**30]}}).encode(),
        json.dumps({"format": 1, "curve": GOOD | {"began": [7]}}).encode(),
        json.dumps({"format": 1, "curve": GOOD | {"skipped": [[5, 1]]}}).encode(),
        json.dumps({"format": 1, "curve": GOOD | {"levels": [10**9, 0]}}).encode(),
        json.dumps({"format": 1, "curve": {key: value * 5000 for key, value in GOOD.items()}}).encode(),
        json.dumps({"format": 1, "curve": GOOD}).encode() + b" " * (5 << 20),
    ],
)
def test_an_impossible_record_does_not_count(tmp_path, text):
    """Whatever lies in a record, it is passed over, also by the next guard, which leaves it where it is."""
    run = open_run(str(tmp_path))
    place = at(tmp_path, f"{RECORDS_FOLDER}/{FOLDER}/{samples_name(dated_name()[0], 1)}")
    place.parent.mkdir(parents=True)
    place.write_bytes(text)
    assert on_record(run) == Curve()
    recorder = CurveRecorder(run)
    recorder.append(row(3))
    recorder.close(LONG)
    assert on_record(run).step == (3,)
    assert place.read_bytes() == text


def test_a_record_of_today_is_read_tomorrow(tmp_path):
    """Fields that are not known are passed over."""
    run = open_run(str(tmp_path))
    known = msgspec.to_builtins(Samples(curve=curve_of([row(1), row(2, math.inf)])))
    place = at(tmp_path, f"{RECORDS_FOLDER}/{FOLDER}/20260101T000000-0123abcd.000007.json")
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(known | {"more": 1, "curve": known["curve"] | {"more": [1]}}))
    assert on_record(run).loss == (1.0, "inf")


def test_old_records_of_a_guard_are_leftovers(tmp_path):
    """Of one guard only the newest record stays when leftovers are removed."""
    run = open_run(str(tmp_path))
    token = dated_name()[0]
    for number in (1, 2, 3):
        write_samples(run, samples_name(token, number), Samples(curve=curve_of([row(number)])))
    assert len(superseded(list_records(run, FOLDER))) == 2
    removed = collect_leftovers(look(run))
    assert len(removed) == 2
    assert on_record(run).step == (3,)


def test_a_process_that_forks_writes_once(tmp_path):
    """A child of the training's process, such as a loader's, writes nothing."""
    run = open_run(str(tmp_path))
    recorder = CurveRecorder(run)
    train(recorder, 1, 10)
    child = os.fork()
    if not child:
        recorder.close(LONG)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert list_records(run, FOLDER) == []
    recorder.close(LONG)
    assert on_record(run).step == tuple(range(1, 11))


def test_ranks_that_do_not_lead_write_nothing(tmp_path):
    """Only one rank of a training records its curve."""
    recorder = CurveRecorder(None)
    train(recorder, 1, 10)
    recorder.close(LONG)
    assert os.listdir(tmp_path) == []


def test_the_poison_of_a_guarded_training_is_in_the_curve(tmp_path):
    """NaN, the way back, the batch that was left out, and the second try are all there."""
    model = torch.nn.Linear(4, 1)
    with guard_of(str(tmp_path), model) as guard:
        for step, batch in guard.steps(list(range(40)), total=30, save_every=10):
            guard.observe(loss=1.0 / step, grad_norm=math.nan if batch == 16 else 2.0)
    curve = on_record(open_run(str(tmp_path)))
    assert curve.step == (*range(1, 18), *range(11, 31))
    assert curve.grad_norm[16] == "nan"
    assert curve.grad_norm.count("nan") == 1
    assert curve.began == (0, 17)
    assert curve.skipped == ((17, 17),)
    assert curve.kept == (16,)
    assert curve.lr[0] == pytest.approx(0.1)


SCRIPT = """
import sys, torch, ckptguard
model = torch.nn.Linear(4, 1)
guard = ckptguard.TrainingGuard(sys.argv[1], model=model, daemon="off")
for step, batch in guard.steps(list(range(20)), total=20, save_every=10):
    guard.observe(loss=1.0 / step)
    if step == 15:
        raise RuntimeError("it ends")
"""


def test_a_script_that_ends_by_an_exception_leaves_its_curve(tmp_path):
    """Without `close`, and with an exception, the end of the interpreter writes the rest."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "it ends" in done.stderr
    assert on_record(open_run(str(tmp_path))).step == tuple(range(1, 16))
