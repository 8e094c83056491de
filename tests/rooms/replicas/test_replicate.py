"""Replicas: sent whole, read back, good there, and enough to go on with."""

import hashlib
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from support.faults import flip
from support.run_contents import files_of, verify_all
from support.runs import QUICK, state_dict, write_sharded, write_torch
from support.tiny_run import TINY, WEIGHTS, cycle, inline, name_of, poison, save
from support.views import look

from ckptguard.errors import DeniedError, NoKnownGoodError, NotFoundError, SettingsError
from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records.lineage import begin_lineage, join_lineage
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.replicas import replicate as module
from ckptguard.replicas import send_checkpoint
from ckptguard.replicas.replicate import find_known_good_anywhere, replica_states, replicate
from ckptguard.replicas.start_run import regain, start_run
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import ANY, find_known_good
from ckptguard.runs.history import load_history
from ckptguard.runs.work import Work
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome
from ckptguard.verification.read_known_good import read_known_good


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


@pytest.fixture
def good(three):
    """A run whose three checkpoints are good, without kept copies."""
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())
    return three


@pytest.mark.parametrize("step", [100, 300])
def test_one_that_cannot_be_read_does_not_hold_up_the_others(good, tmp_path, monkeypatch, step):
    """It has failed, by its own name, and is behind by nothing else."""
    stat = type(good.storage).stat

    def denied(self, key):
        if key == f"net-{step}.pt" and self.url == good.url:
            raise DeniedError(f"{key}: permission denied", key=key)
        return stat(self, key)

    monkeypatch.setattr(type(good.storage), "stat", denied)
    done = replicate(look(good), str(tmp_path / "there"))
    others = [s for s in (300, 200, 100) if s != step]
    expected = [(f"{s}.1", "failed" if s == step else "sent") for s in (300, 200, 100)]
    assert [(str(c.id), c.done) for c in done.checkpoints] == expected
    [failed] = [c for c in done.checkpoints if c.done == "failed"]
    assert "permission denied" in failed.message
    assert failed.path == f"net-{step}.pt"
    assert str(done.last_good) == f"{others[0]}.1"


@pytest.mark.parametrize("by", ["prune", "the trainer"])
def test_what_is_removed_meanwhile_is_gone(root, good, tmp_path, monkeypatch, by):
    """It is no failure, and the replica is not behind because of it."""
    send = module.send_checkpoint

    def removes_another(view, target, candidate, *rest, **more):
        if candidate.id.step == 200:  # which is in use now, and stays
            if by == "prune":
                removed = prune(look(view.run), Policy(keep_last=1, keep_good=1), grace=0.0).removed
                assert [d.checkpoint.path for d in removed] == ["net-100.pt"]
            else:
                os.unlink(root / "net-100.pt")
        return send(view, target, candidate, *rest, **more)

    monkeypatch.setattr(module, "send_checkpoint", removes_another)
    done = replicate(look(good), str(tmp_path / "there"))
    assert [(str(c.id), c.done) for c in done.checkpoints] == [("300.1", "sent"), ("200.1", "sent"), ("100.1", "gone")]
    assert (done.behind, done.trouble) == (0, None)


@pytest.fixture
def pair(tmp_path):
    """A run of two good checkpoints, and its replica."""
    root, place = tmp_path / "run", tmp_path / "elsewhere"
    for step in (100, 200):
        save(str(root), step, step)
    run = open_run(str(root))
    cycle(run, TINY.changed(keep="none"))
    replicate(look(run), str(place))
    return root, place


def test_what_changed_in_a_replica_is_read_before_it_counts_as_there(pair):
    """A touched file is read back once and nothing is sent; one of other bytes is sent again."""
    root, place = pair
    (place / name_of(200) / WEIGHTS).touch()
    replica = open_run(str(place))
    assert str(find_known_good(replica).id) == "100.1"
    assert {(c.done, c.sent) for c in replicate(look(str(root)), str(place)).checkpoints} == {("there", 0)}
    assert str(find_known_good(replica).id) == "200.1"
    poison(place / name_of(200) / WEIGHTS)
    done = {str(c.id): c.done for c in replicate(look(str(root)), str(place)).checkpoints}
    assert done == {"200.1": "sent", "100.1": "there"}
    saved, there = (Path(folder, name_of(200), WEIGHTS).read_bytes() for folder in pair)
    assert hashlib.md5(saved).digest() == hashlib.md5(there).digest()


def test_a_changed_checkpoint_is_answered_from_its_replica(pair):
    """What changed in the run counts as lost for who does not read; who does, learns what it is."""
    root, place = pair
    poison(root / name_of(200) / WEIGHTS)
    replicated = TINY.changed(replicas=(str(place),))
    answer = find_known_good_anywhere(look(str(root), replicated))
    assert (answer.place, answer.path) == ("replica", str(place / name_of(200)))
    poison(place / name_of(200) / WEIGHTS)
    assert str(find_known_good_anywhere(look(str(root), replicated)).id) == "100.1"
    work = Work(scanner=inline)
    read = find_known_good_anywhere(
        look(str(root), replicated), ANY, lambda view, wanted: read_known_good(view, wanted, work, everything=True)
    )
    assert (read.place, str(read.id)) == ("in place", "100.1")


def test_an_impossible_place_is_trouble_and_not_behind(pair, tmp_path):
    """A place that is not there yet is behind; one below a file can never be."""
    (tmp_path / "file").write_text("")
    places = (str(tmp_path / "file" / "replica"), str(tmp_path / "new" / "replica"))
    impossible, new = replica_states(look(str(pair[0]), TINY.changed(replicas=places)))
    assert impossible.trouble == f"there can be no replica at {places[0]}: {tmp_path / 'file'} is not a folder"
    assert (impossible.behind, new.behind, new.trouble) == (None, 2, None)


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
