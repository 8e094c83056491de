"""What a replica knows of its own place is no knowledge of the run's, when it gives a lost checkpoint back."""

import shutil

import pytest
from support.faults import flip
from support.run_contents import verify_all
from support.runs import QUICK
from support.views import look

from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records.run import open_run
from ckptguard.replicas import send_checkpoint
from ckptguard.replicas.replicate import replicate
from ckptguard.replicas.start_run import regain
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome


@pytest.fixture
def replica(three, tmp_path):
    """A replica of a run whose three checkpoints are good, and lie in place alone."""
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())
    replicate(look(three), str(tmp_path / "replica"))
    return open_run(str(tmp_path / "replica"))


def outcomes(run):
    """{step: the outcome that counts}."""
    return {id.step: s.outcome for id, s in load_history(run).current_verdicts("net-#.pt").items()}


def test_damage_and_suspicion_stand_when_the_replica_was_healed(root, three, replica):
    """Its verdicts have higher numbers, and say GOOD of other bytes than those in the run."""
    for name in ("net-100.pt", "net-200.pt"):
        place = type(root)(replica.url) / name
        for _ in range(2):
            flip(place)
            verify_all(replica)
            shutil.copyfile(root / name, place)
            verify_all(replica)
    flip(root / "net-100.pt")
    verify_all(three)
    mark_suspect(look(three), CheckpointId("net-#.pt", 200, 1), "training was sick")
    (root / "net-300.pt").unlink()
    assert outcomes(replica) == dict.fromkeys((100, 200, 300), Outcome.GOOD)
    assert str(regain(look(three, QUICK.changed(replicas=(replica.url,)))).id) == "300.1"
    assert outcomes(three) == {100: Outcome.BAD, 200: Outcome.SUSPECT, 300: Outcome.GOOD}


def test_what_becomes_suspect_on_its_way_stays_so(root, three, replica, monkeypatch):
    """Another process rolls the run back meanwhile."""
    real = send_checkpoint.send_files

    def send(work):
        mark_suspect(look(three), CheckpointId("net-#.pt", 300, 1), "training was sick")
        return real(work)

    (root / "net-300.pt").unlink()
    monkeypatch.setattr(send_checkpoint, "send_files", send)
    regain(look(three, QUICK.changed(replicas=(replica.url,))))
    assert outcomes(three)[300] is Outcome.SUSPECT
    assert str(find_known_good(three).id) == "200.1"


def test_damage_in_the_replica_is_none_in_the_run(root, three, replica):
    """200 is damaged there alone."""
    flip(type(root)(replica.url) / "net-200.pt")
    verify_all(replica)
    (root / "net-300.pt").unlink()
    assert str(regain(look(three, QUICK.changed(replicas=(replica.url,)))).id) == "300.1"
    assert outcomes(three) == dict.fromkeys((100, 200, 300), Outcome.GOOD)


def test_sickness_known_in_the_replica_is_known_in_the_run(root, three, replica):
    """It is of the bytes themselves, wherever they lie."""
    mark_suspect(look(replica), CheckpointId("net-#.pt", 200, 1), "training was sick")
    (root / "net-300.pt").unlink()
    assert str(regain(look(three, QUICK.changed(replicas=(replica.url,)))).id) == "300.1"
    assert outcomes(three)[200] is Outcome.SUSPECT
    assert str(find_known_good(three, before_step=300).id) == "100.1"
