"""What a pass asks of storage: nothing that grows with what did not change."""

import shutil
import sys
from collections import Counter

import pytest
from support.counting_storage import counted
from support.records_on_disk import at
from support.tiny_files import content

from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records.run import open_run
from ckptguard.retention.prune import prune
from ckptguard.runs.run_view import RunView
from ckptguard.upkeep.reconcile import PassNotes, PassResult, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

SETTINGS = Settings(settle=0.0, scan_interval=1.0, workers=1)
IDLE = {"records.names": 1, "run.list": 1, "records.free_space": 1}
# Functions that ask a disk, or that decide from a name what is asked next.
ASKING = {"_entries", "entry_at", "entry_of", "enter", "is_encodable", "is_holding", "is_temporary"}


def save(root, step):
    """A tiny save."""
    folder = root / f"model-{step}"
    folder.mkdir(parents=True)
    for name, data in content(step).items():
        (folder / name).write_bytes(data)


class Daemon:
    """Whoever makes passes over one run, and what they ask of its storage."""

    def __init__(self, root, count, settings=SETTINGS):
        self.root, self.settings, self.notes = root, settings, PassNotes()
        for step in range(1, count + 1):
            save(root, step)
        self.run, self.requests = counted(open_run(str(root)))

    def cycle(self):
        """One pass."""
        self.requests.clear()
        return reconcile(RunView(self.run, self.settings), self.notes, assume_quiet=True)

    def settle(self):
        """Passes until nothing is left to be done."""
        for _ in range(4):
            if self.cycle() == PassResult() and self.requests == IDLE:
                return self
        raise AssertionError(self.requests)


def costs(root, count):
    """Requests of a first pass for each save, of an idle one, and of one with a single new save."""
    daemon = Daemon(root, count)
    assert len(daemon.cycle().checked) == count
    first = daemon.requests.total() / count
    daemon.settle()
    idle = dict(daemon.requests)
    save(root, count + 1)
    assert [c.outcome for c in daemon.cycle().checked] == [Outcome.GOOD]
    return first, idle, daemon.requests.total()


def calls_of_idle_pass(daemon):
    """How often each function of ours is called in a pass over an unchanged run."""
    called = Counter()

    def count(frame, event, _):
        code = frame.f_code
        if event == "call" and "/ckptguard/" in code.co_filename and not code.co_name.startswith("<"):
            called[code.co_name] += 1

    sys.setprofile(count)
    try:
        assert daemon.cycle() == PassResult()
    finally:
        sys.setprofile(None)
    return called


def test_only_the_listings_of_an_idle_pass_grow_with_the_run(tmp_path):
    """What was computed from names and entries that are as they were is not computed again."""
    few, many = (Daemon(tmp_path / str(count), count).settle() for count in (4, 12))
    assert (calls_of_idle_pass(many) - calls_of_idle_pass(few)).keys() <= ASKING
    before = many.notes.settled
    many.cycle()
    assert many.notes.settled.names is before.names
    assert many.notes.settled.listing is before.listing


def test_requests_do_not_depend_on_how_many_others_there_are(tmp_path):
    """An idle pass lists the files and the names of the records, and reads nothing, at 20 and 400 checkpoints; one new
    save costs the same among them; and a first pass costs the same for each."""
    first, idle, new = zip(*(costs(tmp_path / str(count), count) for count in (20, 400)), strict=True)
    assert idle == (IDLE, IDLE)
    assert new[1] <= 1.2 * new[0]
    assert first[1] <= 1.2 * first[0]


def test_a_pass_with_rules_reads_what_is_new(tmp_path):
    """Retention looks at all checkpoints after each save, and reads the records of the new one alone."""
    found = []
    for count in (20, 100):
        daemon = Daemon(tmp_path / str(count), count, SETTINGS.changed(keep_last=1000))
        daemon.cycle()
        daemon.settle()
        save(daemon.root, count + 1)
        assert len(daemon.cycle().checked) == 1
        found.append(daemon.requests["records.open"])
    assert found[1] <= 1.2 * found[0]


def test_an_idle_pass_sees_what_others_did(tmp_path):
    """Files that change, come or go, verdicts of others, copies that vanish, other settings: the next pass looks."""
    daemon = Daemon(tmp_path, 4).settle()

    weights = tmp_path / "model-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert [c.path for c in daemon.cycle().checked] == ["model-2"]
    daemon.settle()

    mark_suspect(RunView(daemon.run, SETTINGS), CheckpointId("model-#", 4, 1), "said by somebody else")
    daemon.cycle()
    assert not at(tmp_path, "_ckptguard/kept/model-#/000000000004.1.json").exists()
    daemon.settle()

    shutil.rmtree(at(tmp_path, "_ckptguard/kept/model-#"))
    daemon.cycle()
    assert len(list(at(tmp_path, "_ckptguard/kept/model-#").glob("*.json"))) == 2
    daemon.settle()

    shutil.rmtree(tmp_path / "model-1")
    assert daemon.cycle().gone == ("model-1",)
    daemon.settle()

    daemon.settings = SETTINGS.changed(keep_good=1)
    daemon.cycle()
    assert len(list(at(tmp_path, "_ckptguard/kept/model-#").glob("*.json"))) == 1
    daemon.settle()

    del daemon.notes.samples["model-3"]
    daemon.notes.settled = None
    daemon.cycle()
    assert daemon.requests != IDLE


def test_what_is_pending_is_looked_at_in_every_pass(tmp_path):
    """A run with a save that is not finished is never idle."""
    daemon = Daemon(tmp_path, 2).settle()
    save(tmp_path, 3)
    weights = tmp_path / "model-3" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    for _ in range(3):
        assert [w.path for w in daemon.cycle().pending] == ["model-3"]
    weights.write_bytes(whole)
    assert [c.outcome for c in daemon.cycle().checked] == [Outcome.GOOD]


@pytest.mark.parametrize("change", ["verdict", "file"])
def test_what_retention_remembers_is_not_taken_for_what_changed(tmp_path, change):
    """A verdict or a file that is another now is read again."""
    daemon = Daemon(tmp_path, 5, SETTINGS.changed(keep_last=1000)).settle()
    view = RunView(daemon.run, daemon.settings, daemon.notes.memory)
    if change == "verdict":
        mark_suspect(view, CheckpointId("model-#", 5, 1), "sick")
        expected = Outcome.SUSPECT
    else:
        weights = tmp_path / "model-5" / "model.safetensors"
        weights.write_bytes(weights.read_bytes())
        expected = Outcome.PENDING
    view.forget()
    done = prune(view, Policy(keep_last=1, keep_good=1), grace=1e9, dry_run=True)
    outcomes = {d.checkpoint.path: d.checkpoint.outcome for d in done.decisions}
    assert outcomes["model-5"] is expected
    assert [outcomes[f"model-{step}"] for step in range(1, 5)] == [Outcome.GOOD] * 4
