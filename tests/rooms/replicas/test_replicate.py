"""Replicas: sent whole, read back, good there, and enough to go on with."""

import os
import shutil
import threading

import pytest
import torch
from support.faults import flip
from support.run_contents import files_of, verify_all
from support.runs import QUICK, state_dict, write_sharded, write_torch
from support.views import look

from ckptguard.errors import NoKnownGoodError, NotFoundError, SettingsError
from ckptguard.records.lineage import begin_lineage, join_lineage
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.replicas.replicate import find_known_good_anywhere, replica_states, replicate
from ckptguard.replicas.start_run import regain, start_run
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.runs.work import Work
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome


@pytest.fixture
def place(tmp_path):
    """Where the replica is to be."""
    return str(tmp_path / "elsewhere" / "exp1")


@pytest.mark.parametrize("url", ["local", "memory://replica-of-three/exp1"])
def test_a_replica_is_a_run_of_its_own(root, three, tmp_path, url):
    """Every good checkpoint lies there under its own name, has its verdict, verifies and restores, without the
    original."""
    url = str(tmp_path / "elsewhere") if url == "local" else url
    write_sharded(root, 400, seed=4)
    reconcile(look(three), PassNotes())
    before = files_of(three)
    done = replicate(look(three), url)
    assert [(str(c.id), c.done) for c in done.checkpoints] == [(f"{step}.1", "sent") for step in (400, 300, 200, 100)]
    assert (done.behind, str(done.last_good), done.trouble) == (0, "400.1", None)
    shutil.rmtree(root)
    replica = open_run(url)
    assert files_of(replica) == before
    assert find_known_good(replica).step == 400
    assert set(verify_all(replica).values()) == {Outcome.GOOD}
    out = restore(look(replica), str(tmp_path / "out"))
    assert out.step == 400
    assert os.listdir(out.path)


def test_what_is_there_is_not_sent_again(three, place):
    """The second call sends nothing."""
    reconcile(look(three), PassNotes())
    replicate(look(three), place)
    again = replicate(look(three), place)
    assert {(c.done, c.sent) for c in again.checkpoints} == {("there", 0)}


def test_what_a_replica_has_lost_is_sent_again(root, three, place):
    """Files that are gone, or that verifying the replica found damaged: those bytes stay, aside."""
    reconcile(look(three), PassNotes())
    replicate(look(three), place)
    there = type(root)(place)
    (there / "net-300.pt").unlink()
    flip(there / "net-200.pt")
    assert verify_all(open_run(place))["net-200.pt"] is Outcome.BAD
    done = replicate(look(three), place)
    assert [c.done for c in done.checkpoints] == ["sent", "sent", "there"]
    assert (done.behind, done.trouble) == (0, None)
    assert str(find_known_good(open_run(place)).id) == "300.1"
    assert (there / "net-200.pt").read_bytes() == (root / "net-200.pt").read_bytes()
    assert list(there.glob("_ckptguard/quarantine/*/*.damaged-*/*net-200.pt*"))
    assert set(verify_all(open_run(place)).values()) == {Outcome.GOOD}


def test_what_was_pruned_in_the_replica_stays_away(three, place):
    """Also while it lies in the trash there."""
    reconcile(look(three), PassNotes())
    replicate(look(three), place)
    removed = prune(look(place), Policy(keep_last=2, keep_good=2), grace=1e6).removed
    assert [str(d.checkpoint.id) for d in removed] == ["100.1"]
    assert [c.done for c in replicate(look(three), place).checkpoints] == ["there"] * 3
    assert set(files_of(open_run(place))) == {"net-200.pt", "net-300.pt"}


def test_a_dry_run_writes_nothing(three, place):
    """It says what would be sent."""
    reconcile(look(three), PassNotes())
    done = replicate(look(three), place, dry_run=True)
    assert {c.done for c in done.checkpoints} == {"would send"}
    assert done.behind == 3
    assert not os.path.exists(place)


def test_damage_in_the_run_never_becomes_a_replica(root, three, place):
    """A flipped bit is found on the way: BAD in the run, and nothing of it in the replica."""
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())
    flip(root / "net-300.pt")
    done = replicate(look(three), place)
    assert [c.done for c in done.checkpoints] == ["damaged", "sent", "sent"]
    assert str(find_known_good(three).id) == "200.1", "it is bad in the run now"
    replica = open_run(place)
    assert set(files_of(replica)) == {"net-100.pt", "net-200.pt"}
    assert str(find_known_good(replica).id) == "200.1"


def test_a_whole_kept_copy_is_sent_in_its_stead(root, three, place):
    """With bytes of its own, a kept copy makes the replica whole."""
    before = (root / "net-300.pt").read_bytes()
    reconcile(look(three, QUICK.changed(keep="copy")), PassNotes())
    flip(root / "net-300.pt")
    done = replicate(look(three), place)
    assert done.checkpoints[0].done == "sent"
    assert str(done.last_good) == "300.1"
    assert files_of(open_run(place))["net-300.pt"] == before


def test_a_step_that_was_saved_again_takes_the_place_of_the_older_one(root, three, place):
    """After a rollback the run saves a step anew: in the replica both are there, and the new one is known-good."""
    reconcile(look(three), PassNotes())
    replicate(look(three), place)
    roll_back(look(three), GoBack(reason="sick", to_id=CheckpointId("net-#.pt", 200, 1), check_writing=False))
    write_torch(root, 300, seed=33)
    reconcile(look(three), PassNotes())
    assert str(find_known_good(three).id) == "300.2"
    done = replicate(look(three), place)
    assert (done.behind, str(done.last_good)) == (0, "300.2")
    replica = open_run(place)
    answer = find_known_good(replica)
    assert str(answer.id) == "300.2"
    with open(answer.path, "rb") as file:
        assert file.read() == (root / "net-300.pt").read_bytes()
    assert not set(verify_all(replica).values()) - {Outcome.GOOD}


def test_suspicion_follows_into_the_replica(three, place):
    """What training was found to be sick in is not known-good in the replica either, once it is told."""
    reconcile(look(three), PassNotes())
    replicate(look(three), place)
    assert str(find_known_good(open_run(place)).id) == "300.1"
    roll_back(look(three), GoBack(reason="sick", to_id=CheckpointId("net-#.pt", 200, 1), check_writing=False))
    replicate(look(three), place)
    assert str(find_known_good(open_run(place)).id) == "200.1"


def test_another_run_is_no_replica(root, three, tmp_path, place):
    """A place that holds a run of its own, or another's replica, is left alone."""
    other = tmp_path / "other"
    write_torch(other, 900, seed=9)
    other_run = open_run(str(other))
    reconcile(look(other_run), PassNotes())
    reconcile(look(three), PassNotes())
    assert "is another run" in replicate(look(three), str(other)).trouble
    replicate(look(other_run), place)
    assert "belongs to another training" in replicate(look(three), place).trouble
    assert set(files_of(open_run(place))) == {"net-900.pt"}
    for inside in (str(root / "replica"), str(tmp_path)):
        with pytest.raises(SettingsError):
            replicate(look(three), inside)


def test_being_called_off_keeps_what_arrived(three, place):
    """A stop ends it between two blocks; the next call goes on with the files that are missing."""
    reconcile(look(three), PassNotes())
    stop = threading.Event()
    counted = []

    def progress(length):
        counted.append(length)
        if len(counted) == 3:
            stop.set()

    done = replicate(look(three), place, work=Work(stop=stop, progress=progress))
    assert done.trouble is not None
    assert len(done.checkpoints) < 3
    done = replicate(look(three), place)
    assert done.behind == 0
    assert done.trouble is None


def test_files_that_arrived_whole_are_not_sent_again(root, run, place):
    """A sharded checkpoint of which some files are there, whole or not, as a killed replicator leaves them."""
    path = write_sharded(root, 100, seed=1)
    reconcile(look(run), PassNotes())
    names = sorted(p.name for p in (root / path).iterdir())
    os.makedirs(f"{place}/{path}")
    join_lineage(open_run(place), begin_lineage(run))
    for name in names[:-1]:
        shutil.copy(root / path / name, f"{place}/{path}/{name}")
    largest = max(names[:-1], key=lambda n: (root / path / n).stat().st_size)
    flip(type(root)(place) / path / largest)
    sizes = {name: (root / path / name).stat().st_size for name in names}
    done = replicate(look(run), place)
    assert done.checkpoints[0].sent == sizes[names[-1]] + sizes[largest]
    assert files_of(open_run(place)) == files_of(run)


def test_two_at_once(root, run, place):
    """Racing replicators: one seals, the other says so or finds it there; the replica is whole."""
    for step in (100, 200):
        torch.save(state_dict(step), root / f"net-{step}.pt")
    reconcile(look(run), PassNotes())
    for number in range(4):
        url, answers = f"{place}-{number}", []
        begin = threading.Barrier(4)

        def work(url=url, answers=answers, begin=begin):
            begin.wait()
            answers.append(replicate(look(open_run(str(root))), url))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        words = [[c.done for c in a.checkpoints] for a in answers]
        assert len(answers) == 4
        assert {w for a in words for w in a} <= {"sent", "raced", "there"}, answers
        assert files_of(open_run(url)) == files_of(run)
        assert str(find_known_good(open_run(url)).id) == "200.1"


@pytest.fixture
def replicated(three, place):
    """The settings of a run whose good checkpoints have arrived at its replica."""
    reconcile(look(three), PassNotes())
    replicate(look(three), place)
    return QUICK.changed(replicas=(place,))


def test_somebodys_files_are_never_written_over(three, tmp_path):
    """A folder with checkpoints that nobody replicated is no replica."""
    reconcile(look(three), PassNotes())
    write_torch(tmp_path / "theirs", 300, seed=77)
    before = (tmp_path / "theirs" / "net-300.pt").read_bytes()
    assert "another run" in replicate(look(three), str(tmp_path / "theirs")).trouble
    assert (tmp_path / "theirs" / "net-300.pt").read_bytes() == before


def test_known_good_and_restore_take_the_nearest_copy(root, three, place, replicated, tmp_path):
    """In place first; when that and the kept copy are lost, the replica; an older one in the run only after that."""
    assert find_known_good_anywhere(look(three, replicated)).place == "in place"
    before = (root / "net-300.pt").read_bytes()
    os.unlink(root / "net-300.pt")
    assert find_known_good_anywhere(look(three, replicated)).place == "kept"
    shutil.rmtree(root / "_ckptguard" / "kept")
    answer = find_known_good_anywhere(look(three, replicated))
    assert (answer.place, str(answer.id), answer.path) == ("replica", "300.1", f"{place}/net-300.pt")
    assert str(find_known_good(three).id) == "200.1", "which the run itself still has"
    out = restore(look(three, replicated), str(tmp_path / "out"))
    assert (str(out.id), out.source) == ("300.1", place)
    with open(out.path, "rb") as file:
        assert file.read() == before
    assert restore(look(three, replicated), str(tmp_path / "again"), step=300).source == place


def test_a_training_begun_anew_is_not_helped_by_the_replica_of_the_one_before(root, three, place, replicated, tmp_path):
    """In the same folder, so that the settings name the same replica: its checkpoints are of other weights."""
    shutil.rmtree(root)
    write_torch(root, 100, seed=77)
    anew = open_run(str(root))
    assert str(find_known_good_anywhere(look(anew, replicated)).id) == "300.1", (
        "a folder without records may be the lost run"
    )
    reconcile(look(anew, QUICK.changed(keep="none")), PassNotes())
    flip(root / "net-100.pt")
    assert verify_all(anew) == {"net-100.pt": Outcome.BAD}
    for begun in (False, True):
        (current_verdict,) = replica_states(look(anew, replicated))
        assert (current_verdict.last_good, current_verdict.behind) == (None, None)
        assert "belongs to another training" in current_verdict.trouble
        with pytest.raises(NoKnownGoodError):
            find_known_good_anywhere(look(anew, replicated))
        with pytest.raises(NoKnownGoodError):
            restore(look(anew, replicated), str(tmp_path / "out"))
        with pytest.raises(NotFoundError):
            restore(look(anew, replicated), str(tmp_path / "out"), step=300)
        assert begun or replicate(look(anew), place).trouble


def test_damage_in_place_is_no_loss(root, three, place, replicated, tmp_path):
    """What restoring finds damaged in the run comes from the replica, also when it is asked for by its step."""
    shutil.rmtree(root / "_ckptguard" / "kept")
    flip(root / "net-300.pt")
    assert restore(look(three, replicated), str(tmp_path / "out")).source == place
    assert verify_all(three)["net-300.pt"] is Outcome.BAD
    assert restore(look(three, replicated), str(tmp_path / "again"), step=300).source == place


def test_a_damaged_replica_is_found_and_the_next_place_is_taken(root, three, place, replicated, tmp_path):
    """Of two replicas the nearer one is damaged."""
    second = f"{place}-2"
    replicate(look(three), second)
    flip(type(root)(place) / "net-300.pt")
    shutil.rmtree(root)
    lost = open_run(str(root), must_exist=False)
    out = restore(look(lost, QUICK.changed(replicas=(place, second))), str(tmp_path / "out"))
    assert (str(out.id), out.source) == ("300.1", second)


def test_an_unreachable_replica_is_only_a_warning(three, tmp_path, replicated, caplog):
    """Restoring goes on with the others."""
    os.unlink(three.storage.root + "/net-300.pt")
    shutil.rmtree(three.storage.root + "/_ckptguard/kept")
    gone = str(tmp_path / "not" / "mounted")
    settings = replicated.changed(replicas=(gone, *replicated.replicas))
    assert find_known_good_anywhere(look(three, settings)).place == "replica"
    assert "cannot be used" in caplog.text


def test_a_lost_run_is_given_back_by_its_replica(root, three, place, replicated):
    """Its known-good checkpoint in place, its history, and numbers that go on where they ended."""
    before = (root / "net-300.pt").read_bytes()
    shutil.rmtree(root)
    started = start_run(look(open_run(place)), str(root), QUICK)
    assert (str(started.id), started.source, started.path) == ("300.1", place, f"{root}/net-300.pt")
    assert (root / "net-300.pt").read_bytes() == before
    run = open_run(str(root))
    assert find_known_good(run).place == "in place"
    assert list(reconcile(look(run), PassNotes()).checked) == [], "its verdict stands"
    again = replicate(look(run), place)
    assert again.trouble is None
    assert {c.done for c in again.checkpoints} == {"there"}
    write_torch(root, 200, seed=22)
    reconcile(look(run), PassNotes())
    assert CheckpointId("net-#.pt", 200, 2) in load_history(run).sealed("net-#.pt")
    with pytest.raises(SettingsError):
        start_run(look(open_run(place)), str(root), QUICK)


def test_what_is_found_damaged_in_the_replica_gives_way_to_an_older_one(root, three, place, replicated):
    """And it is bad there from then on."""
    shutil.rmtree(root)
    flip(type(root)(place) / "net-300.pt")
    started = start_run(look(open_run(place)), str(root), QUICK)
    assert str(started.id) == "200.1"
    assert str(find_known_good(open_run(place)).id) == "200.1"
    assert verify_all(open_run(str(root))) == {"net-200.pt": Outcome.GOOD}


def test_lost_files_of_a_run_come_back(root, three, place, replicated):
    """The records are there and the files are not, or are damaged: those go to quarantine."""
    shutil.rmtree(root / "_ckptguard" / "kept")
    before = {p.name: p.read_bytes() for p in root.glob("net-*")}
    for path in root.glob("net-[12]*"):
        path.unlink()
    flip(root / "net-300.pt")
    assert verify_all(three) == {"net-300.pt": Outcome.BAD}
    assert str(regain(look(three, replicated)).id) == "300.1"
    assert (root / "net-300.pt").read_bytes() == before["net-300.pt"]
    assert str(find_known_good(three).id) == "300.1"
    assert list(reconcile(look(three), PassNotes()).checked) == []
    assert list((root / "_ckptguard" / "quarantine").rglob("*net-300.pt*"))
