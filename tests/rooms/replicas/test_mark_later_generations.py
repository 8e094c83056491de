"""Training that goes on from an older checkpoint of a replica: the newer ones stay behind, whoever asks for them."""

import os
import shutil

import pytest
from support.faults import flip
from support.runs import QUICK, write_torch
from support.views import look

from ckptguard.errors import SettingsError
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.replicas.replicate import find_known_good_anywhere, replicate
from ckptguard.replicas.start_run import regain, start_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.verification.checkpoint import verify_checkpoint


@pytest.fixture
def replica(three, tmp_path):
    """A replica of a run with the good steps 100, 200 and 300."""
    reconcile(look(three), PassNotes())
    place = str(tmp_path / "elsewhere")
    replicate(look(three), place)
    return open_run(place)


def test_what_is_newer_than_the_chosen_step_does_not_come_back(replica, tmp_path):
    """Neither to go on from, nor as known-good, nor restored; and the same command again changes nothing."""
    settings = QUICK.changed(replicas=(replica.url,))
    new = str(tmp_path / "new")
    for _ in range(2):
        assert str(start_run(look(replica), new, QUICK, step=100).id) == "100.1"
    run = open_run(new)
    assert regain(look(run, settings)) is None
    assert str(find_known_good_anywhere(look(run, settings)).id) == "100.1"
    assert str(restore(look(run, settings), str(tmp_path / "out")).id) == "100.1"
    for outcome in ("bad", "good"):  # later verdicts of the replica are no reason to change one's mind
        flip(tmp_path / "elsewhere" / "net-300.pt")
        checkpoint = look(replica).checkpoint("net-300.pt")
        assert verify_checkpoint(look(replica), checkpoint).outcome.value == outcome
    os.unlink(tmp_path / "new" / "net-100.pt")
    shutil.rmtree(tmp_path / "new" / "_ckptguard" / "kept", ignore_errors=True)
    assert str(regain(look(run, settings)).id) == "100.1", "what it lost of its own comes back"
    assert regain(look(run, settings)) is None
    assert str(find_known_good(replica).id) == "300.1", "nothing happened to the replica"


def test_the_new_branch_takes_the_place_of_the_old_one_in_the_replica(replica, tmp_path):
    """The same steps saved anew are new generations, and the replica learns that the old ones were left behind."""
    new = tmp_path / "new"
    start_run(look(replica), str(new), QUICK, step=100)
    run = open_run(str(new))
    write_torch(new, 200, seed=77)
    reconcile(look(run), PassNotes())
    assert str(find_known_good(run).id) == "200.2"
    done = replicate(look(run), replica.url)
    assert (done.trouble, done.behind, str(done.last_good)) == (None, 0, "200.2")
    assert [(str(c.id), c.done) for c in done.checkpoints] == [("200.2", "sent"), ("100.1", "there")]
    assert str(find_known_good(replica).id) == "200.2"
    assert load_history(replica).verdict(CheckpointId("net-#.pt", 300, 1)).outcome.value == "suspect"
    assert regain(look(run, QUICK.changed(replicas=(replica.url,)))) is None


def test_without_a_step_nothing_is_left_behind(replica, tmp_path, caplog):
    """What was only damaged is said, and no choice of anybody."""
    flip(tmp_path / "elsewhere" / "net-300.pt")
    shutil.rmtree(tmp_path / "elsewhere" / "_ckptguard" / "kept", ignore_errors=True)
    new = str(tmp_path / "new")
    assert str(start_run(look(replica), new, QUICK).id) == "200.1"
    assert "300.1 could not be copied" in caplog.text
    assert load_history(open_run(new)).quarantined == {}


@pytest.mark.parametrize("inside", ["sub", "a/b"])
def test_no_run_begins_in_its_own_replica(replica, inside):
    """Nor around it."""
    with pytest.raises(SettingsError, match="is inside the other"):
        start_run(look(replica), f"{replica.url}/{inside}", QUICK)
    with pytest.raises(SettingsError, match="is inside the other"):
        start_run(look(replica), os.path.dirname(replica.url), QUICK)
