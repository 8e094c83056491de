"""What a scrub and a repair ask of storage: one listing of the run, and the same for a place among many others."""

import shutil
import time
from unittest import mock

from support.counting_storage import counted
from support.faults import flip
from support.runs import write_torch

from ckptguard.records.run import open_run
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import ScrubOrder, scrub
from ckptguard.runs.run_view import RunView
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings

SETTINGS = Settings(settle=0.0, scan_interval=1.0, keep="copy", keep_good=2)


def good_run(root, count):
    """A run of so many good checkpoints, the newest two of which have kept copies; it counts what it is asked."""
    write_torch(root, 1, seed=1)
    for step in range(2, count + 1):
        shutil.copyfile(root / "net-1.pt", root / f"net-{step}.pt")
    reconcile(RunView(open_run(str(root)), SETTINGS), PassNotes(), assume_quiet=True)
    return counted(open_run(str(root)))


def cost_of_one(root, count):
    """Requests to read one place again, a minute later, among so many checkpoints. Within the second in which it was
    read before, its record has the name of the one before, and nothing is removed."""
    run, requests = good_run(root, count)
    every = scrub(RunView(run, SETTINGS))
    assert len(every.places) == count + 2
    others = {(one.id, one.place) for one in every.places[1:]}
    requests.clear()
    later = time.time() + 60.0
    with mock.patch("time.time", return_value=later):
        assert len(scrub(RunView(run, SETTINGS), ScrubOrder(leave_out=others)).places) == 1
    assert requests["run.list"] == 1
    return requests.total()


def test_a_place_costs_the_same_among_many(tmp_path):
    """Of 40 no more than of 10."""
    assert cost_of_one(tmp_path / "many", 40) <= cost_of_one(tmp_path / "few", 10)


def test_what_is_damaged_is_found_and_repaired_without_another_listing(tmp_path):
    """The run is listed once by the scrub that finds it. The repair looks once more for what a killed one left."""
    run, requests = good_run(tmp_path / "run", 20)
    flip(tmp_path / "run" / "net-20.pt", -9000)
    requests.clear()
    found = scrub(RunView(run, SETTINGS))
    assert [str(one.id) for one in found.places if one.outcome.value == "bad"] == ["20.1"]
    assert requests["run.list"] == 1
    requests.clear()
    assert [file.repaired for file in repair(RunView(run, SETTINGS)).files] == [True]
    assert requests["run.list"] == 2
