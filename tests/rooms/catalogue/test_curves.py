"""The curve of a run in the catalogue: from the guard's record and the trainer's log, read only when they change."""

import json
import math

import msgspec
import pytest
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from support.counting_storage import counted
from support.faulty_storage import Fault, Faults, FaultyStorage
from support.tiny_run import TINY, inline

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.catalogue.curves import unpacked
from ckptguard.engine.watched_run import Passed
from ckptguard.records.run import open_run
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.training.signals.curve_recorder import CurveRecorder
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.curve import Curve

RECORD = "the record of the guard"


class Watched:
    """A run, its feed, and what a note asks of its storage."""

    def __init__(self, folder, *, catalogue):
        (folder / "run").mkdir()
        self.folder = folder / "run"
        self.catalogue = Catalogue(str(folder) if catalogue else None)
        self.run, self.requests = counted(open_run(str(self.folder)))
        self.notes, self.feed = PassNotes(), CatalogueFeed(self.catalogue)

    def make_pass(self):
        """One pass. Returns the curve, and the requests of its note."""
        view = RunView(self.run, TINY)
        reconcile(view, self.notes, work=Work(scanner=inline), assume_quiet=True)
        self.requests.clear()
        self.feed.note(view, Passed(notes=self.notes))
        assert not [one for one in self.feed._runs.values() if one.failures]
        row = self.catalogue.noted(self.run.run_id).curve
        return unpacked(row), row.source, self.requests.total()

    def train(self, first, last):
        """A guarded training."""
        recorder = CurveRecorder(open_run(str(self.folder)))
        for step in range(first, last + 1):
            recorder.append((step, math.nan if step == 3 else 1.0, None, None, None))
        recorder.close(60.0)

    def log(self, name, steps):
        """A log of the trainer."""
        place = self.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        entries = [{"step": step, "loss": 2.0} for step in steps]
        text = json.dumps({"log_history": entries})
        if name.endswith(".csv"):
            text = "step,loss\n" + "".join(f"{step - 1},2.0\n" for step in steps)
        place.write_text(text)


@pytest.fixture(params=[True, False], ids=["catalogue", "memory"])
def watched(request, tmp_path):
    """A run without checkpoints, with a catalogue or without one."""
    return Watched(tmp_path, catalogue=request.param)


def test_the_record_is_read_once(watched):
    """A record is taken in with the next pass; an unchanged one is not asked for again."""
    assert watched.make_pass()[:2] == (Curve(), None)
    watched.train(1, 5)
    curve, source, requests = watched.make_pass()
    assert (curve.step, curve.loss, source) == ((1, 2, 3, 4, 5), (1.0, 1.0, "nan", 1.0, 1.0), RECORD)
    assert requests > 0
    assert watched.make_pass() == (curve, source, 0)
    watched.train(4, 6)
    curve, _, _ = watched.make_pass()
    assert (curve.step, curve.began) == ((1, 2, 3, 4, 5, 4, 5, 6), (0, 5))


def test_the_trainers_own_log_is_read_once(watched):
    """So is a log, and again when it has grown."""
    watched.log("checkpoint-4/trainer_state.json", [2, 4])
    curve, source, _ = watched.make_pass()
    assert (curve.step, source) == ((2, 4), "checkpoint-4/trainer_state.json")
    watched.make_pass()
    assert watched.make_pass() == (curve, source, 0)
    watched.log("lightning_logs/version_0/metrics.csv", [1, 2, 3])
    curve, source, _ = watched.make_pass()
    assert (curve.step, source) == ((1, 2, 3), "lightning_logs/version_0/metrics.csv")


def test_a_log_tells_what_the_record_does_not(watched):
    """Updates before and after those that a guard saw come from the trainer's log."""
    watched.train(4, 6)
    watched.log("checkpoint-9/trainer_state.json", range(1, 10))
    curve, source, _ = watched.make_pass()
    assert (curve.step, source) == (tuple(range(1, 10)), f"{RECORD} and checkpoint-9/trainer_state.json")
    assert curve.loss == (2.0,) * 3 + (1.0,) * 3 + (2.0,) * 3


def test_a_log_that_is_half_written_is_passed_over(watched):
    """The one before it counts until it can be read."""
    watched.log("checkpoint-2/trainer_state.json", [1, 2])
    place = watched.folder / "checkpoint-4" / "trainer_state.json"
    place.parent.mkdir()
    place.write_text('{"log_history": [{"st')
    assert watched.make_pass()[0].step == (1, 2)
    watched.log("checkpoint-4/trainer_state.json", [1, 2, 3])
    assert watched.make_pass()[0].step == (1, 2, 3)


def test_a_curve_that_is_gone_is_shown_no_more(watched):
    """Records that a person removed are not remembered."""
    watched.train(1, 5)
    watched.make_pass()
    watched.run.records.remove("samples")
    assert watched.make_pass()[:2] == (Curve(), None)


@pytest.mark.parametrize("kind", [Fault.EIO, Fault.EACCES])
def test_a_storage_that_fails_now_and_then_loses_no_curve(watched, kind):
    """Whichever request of a note fails: the rows of the run are noted all the same, and the curve in the end."""
    for nth in range(1, 40):
        watched.train(nth, nth)
        whole, faults = watched.run, Faults(kind, nth, only=lambda _, key: key.startswith("samples/"))
        watched.run = msgspec.structs.replace(whole, records=FaultyStorage(whole.records, faults))
        watched.make_pass()
        watched.run = whole
        last = watched.make_pass()[0].step
        if not faults.reached:
            break
        assert last == tuple(range(1, nth + 1)) or kind is Fault.EACCES
    assert nth > 1
    assert watched.make_pass()[0].step == tuple(range(1, nth + 1))


def test_a_hostile_name_is_text(watched):
    """The path of a log is escaped, and cut."""
    watched.log("\x1b[31m<img src=x>\u202e" + "/" + "x" * 200 + "/" + "y" * 200 + "/trainer_state.json", [1])
    _, source, _ = watched.make_pass()
    assert len(source) < 400
    assert source.isprintable()
