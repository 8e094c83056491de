"""One pass: find finished saves, protect them, verify them, promote or release their copies."""

import os
import shutil

import pytest
import torch
from support.faults import flip
from support.records_on_disk import at
from support.runs import QUICK, save_file, state_dict, write_safetensors, write_sharded, write_torch
from support.views import look

from ckptguard.errors import CouldNotTellError, DeniedError, NoKnownGoodError, StorageError, TransientError, WorkerError
from ckptguard.inspect.list_states import survey
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.runs.work import Work
from ckptguard.scan import scan_files
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target
from ckptguard.verification.user_decisions import accept


def outcomes(run):
    """{path: outcome} of what is in place."""
    return {s.path: s.outcome for s in survey(look(run)) if s.in_place}


def poisoned(seed):
    """A state in which one weight overflowed in fp16 arithmetic."""
    state = state_dict(seed)
    huge = torch.full((48, 48), 60000.0, dtype=torch.float16)
    state["layers.1.key.weight"] = huge + huge
    return state


def test_every_save_gets_a_verdict_and_the_newest_two_good_ones_a_copy(three):
    """After one pass all three are GOOD and the two newest are kept."""
    done = reconcile(look(three), PassNotes())
    assert [c.outcome for c in done.checked] == [Outcome.GOOD] * 3
    assert done.pending == ()
    assert [str(id) for id in list_kept(three)] == ["200.1", "300.1"]
    assert str(find_known_good(three).id) == "300.1"


def test_a_second_pass_reads_and_writes_nothing(three):
    """What stands is not read again, neither by the same process nor by a new one."""
    notes = PassNotes()
    reconcile(look(three), notes)
    names = load_history(three).names

    def refuse(*args):
        raise AssertionError("scanned again")

    assert reconcile(look(three), notes, work=Work(scanner=refuse)).checked == ()
    assert reconcile(look(three), PassNotes(), work=Work(scanner=refuse)).checked == ()
    assert load_history(three).names == names


def test_a_poisoned_save_is_bad_and_its_copy_is_released(root, three):
    """NaN or Inf weights are BAD, the pending copy goes, known-good stays."""
    torch.save(poisoned(400), root / "net-400.pt")
    done = reconcile(look(three), PassNotes())
    assert outcomes(three)["net-400.pt"] is Outcome.BAD
    finding = next(f for c in done.checked if c.step == 400 for f in c.findings if f.check == "finite")
    assert (finding.file, finding.tensor, finding.count) == ("net-400.pt", "layers.1.key.weight", 48 * 48)
    assert str(find_known_good(three).id) == "300.1"
    assert read_kept(three, CheckpointId("net-#.pt", 400, 1)) is None


def test_rotation_takes_the_original_and_the_copy_stays(root, three):
    """When the trainer deletes a checkpoint, its kept copy is known-good and byte for byte the same."""
    before = (root / "net-300.pt").read_bytes()
    notes = PassNotes()
    reconcile(look(three), notes)
    for step in (100, 200, 300):
        (root / f"net-{step}.pt").unlink()
    done = reconcile(look(three), notes)
    assert done.gone == ("net-100.pt", "net-200.pt", "net-300.pt")
    answer = find_known_good(three)
    assert (str(answer.id), answer.kept) == ("300.1", True)
    with open(answer.path, "rb") as file:
        assert file.read() == before


def test_an_unfinished_save_is_pending_and_then_incomplete(root, run):
    """A missing shard makes a save pending; past the limit it is INCOMPLETE; completed after all, it is GOOD."""
    path = write_sharded(root, 100, seed=1)
    shard = root / path / "model-00002-of-00003.safetensors"
    shard.rename(root / "aside.bin.tmp")
    notes = PassNotes()
    first = reconcile(look(run), notes)
    assert [w.path for w in first.pending] == [path]
    assert "model-00002" in first.pending[0].reason or "2 of 3" in first.pending[0].reason
    reconcile(look(run, QUICK.changed(unfinished_limit=0.0)), PassNotes())
    assert outcomes(run) == {path: Outcome.INCOMPLETE}
    with pytest.raises(NoKnownGoodError):
        find_known_good(run)
    (root / "aside.bin.tmp").rename(shard)
    reconcile(look(run), notes)
    assert str(find_known_good(run).id) == "100.1"


def test_settling_needs_two_equal_samples(root, run):
    """A save that was written just now waits for `settle`; an older one does not."""
    write_torch(root, 100, seed=1)
    patient = QUICK.changed(settle=3600.0)
    done = reconcile(look(run, patient), PassNotes())
    assert [w.path for w in done.pending] == ["net-100.pt"]
    assert 0 < done.next_in <= 3600
    old = os.stat(root / "net-100.pt").st_mtime - 7200
    os.utime(root / "net-100.pt", (old, old))
    assert [c.outcome for c in reconcile(look(run, patient), PassNotes()).checked] == [Outcome.GOOD]


def test_a_save_that_changes_while_it_is_read_gets_no_verdict(root, run):
    """The scan of a moving file says nothing."""
    write_torch(root, 100, seed=1)

    def meddling(storage, keys, options, progress):
        result = scan_files(storage, keys, options, progress)
        write_torch(root, 100, seed=2)
        return result

    done = reconcile(look(run), PassNotes(), work=Work(scanner=meddling))
    assert done.checked == ()
    assert [w.path for w in done.pending] == ["net-100.pt"]
    assert load_history(run).names == {}


@pytest.mark.parametrize("error", [WorkerError("killed"), DeniedError("no", key="x"), CouldNotTellError("?")])
def test_could_not_tell_is_never_bad(root, run, error):
    """A scanner that fails leaves the save pending, and it is verified when the scanner works again."""
    write_torch(root, 100, seed=1)

    def failing(*args):
        raise error

    done = reconcile(look(run), PassNotes(), work=Work(scanner=failing))
    assert done.checked == ()
    assert [w.path for w in done.pending] == ["net-100.pt"]
    assert done.could_not_tell
    assert load_history(run).names == {}
    assert [c.outcome for c in reconcile(look(run), PassNotes()).checked] == [Outcome.GOOD]


def test_saving_again_over_a_good_checkpoint_is_a_new_generation(root, run):
    """A whole re-save of the same name is generation 2, GOOD, and no false alarm."""
    write_torch(root, 100, seed=1)
    notes = PassNotes()
    reconcile(look(run), notes)
    write_torch(root, 100, seed=2)
    done = reconcile(look(run), notes)
    assert [(str(c.id), c.outcome) for c in done.checked] == [("100.2", Outcome.GOOD)]
    assert str(find_known_good(run).id) == "100.2"
    assert read_kept(run, CheckpointId("net-#.pt", 100, 2)).how != "link"


def test_a_resave_killed_midway_is_never_good(root, run):
    """Half of a new save over a good checkpoint is pending, then INCOMPLETE; the good copy stays if it has bytes of
    its own."""
    write_torch(root, 100, seed=1)
    settings = QUICK.changed(keep="copy")
    notes = PassNotes()
    reconcile(look(run, settings), notes)
    write_torch(root / "other", 100, seed=2)
    half = (root / "other" / "net-100.pt").read_bytes()
    shutil.rmtree(root / "other")
    (root / "net-100.pt").write_bytes(half[: len(half) // 2])
    done = reconcile(look(run, settings), notes)
    assert [w.path for w in done.pending] == ["net-100.pt"]
    reconcile(look(run, settings.changed(unfinished_limit=0.0)), PassNotes())
    assert outcomes(run)["net-100.pt"] is Outcome.INCOMPLETE
    answer = find_known_good(run)
    assert (str(answer.id), answer.kept) == ("100.1", True)


def test_damage_in_place_leaves_a_copy_with_its_own_bytes_known_good(root, run):
    """A flipped bit makes the place BAD; an independent copy is still known-good, a hard link is not."""
    for keep, survives in (("copy", True), ("auto", True), ("link", False)):
        folder = root / keep
        folder.mkdir()
        write_torch(folder, 100, seed=1)
        own = open_run(str(folder))
        settings = QUICK.changed(keep=keep)
        notes = PassNotes()
        reconcile(look(own, settings), notes)
        how = read_kept(own, CheckpointId("net-#.pt", 100, 1)).how
        flip(folder / "net-100.pt", 20000, new_times=True)
        done = reconcile(look(own, settings), notes)
        assert [c.outcome for c in done.checked] == [Outcome.BAD]
        if survives or how == "reflink":
            assert find_known_good(own).kept
        else:
            with pytest.raises(NoKnownGoodError):
                find_known_good(own)


def test_one_shard_saved_anew_waits_for_the_others(root, run):
    """A re-save that has written one of three shards is pending; when all are new it is generation 2."""
    path = write_sharded(root, 100, seed=1)
    notes = PassNotes()
    reconcile(look(run), notes)
    write_sharded(root / "new", 100, seed=2)
    shards = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    shutil.copy(root / "new" / path / shards[0], root / path / shards[0])
    done = reconcile(look(run), notes)
    assert [w.path for w in done.pending if w.path == path] == [path]
    assert not [c for c in done.checked if c.path == path]
    for shard in shards[1:]:
        shutil.copy(root / "new" / path / shard, root / path / shard)
    shutil.rmtree(root / "new")
    done = reconcile(look(run), notes)
    assert [(str(c.id), c.outcome) for c in done.checked] == [("100.2", Outcome.GOOD)]


def test_a_missing_tensor_against_the_reference_is_suspect_until_accepted(root, run):
    """The schema of the previous good checkpoint is the reference; `accept` makes a change deliberate."""
    write_torch(root, 100, seed=1)
    state = state_dict(2)
    del state["embed.weight"]
    torch.save(state, root / "net-200.pt")
    reconcile(look(run), PassNotes())
    assert outcomes(run)["net-200.pt"] is Outcome.SUSPECT
    assert str(find_known_good(run).id) == "100.1"
    assert accept(look(run), "200").outcome is Outcome.GOOD
    assert str(find_known_good(run).id) == "200.1"


def test_a_question_stands_when_it_is_verified_again(root, run):
    """What is SUSPECT at first sight for its shapes is so when it is read again, now with a manifest of its own."""
    write_torch(root, 100, seed=1)
    state = state_dict(2)
    state["layers.0.query.weight"] = state["layers.0.query.weight"][:24].clone()
    torch.save(state, root / "net-200.pt")
    for _ in range(2):
        reconcile(look(run), PassNotes())
        (root / "net-200.pt").touch()
    assert outcomes(run)["net-200.pt"] is Outcome.SUSPECT


def test_folders_are_kept_whole(root, run):
    """A kept folder holds every file of the checkpoint under its own name."""
    path = write_safetensors(root, 100, seed=1)
    reconcile(look(run), PassNotes())
    shutil.rmtree(root / path)
    answer = find_known_good(run)
    assert sorted(os.listdir(answer.path)) == ["config.json", "model.safetensors"]
    assert os.path.basename(answer.path) == path


def test_a_sealed_folder_that_lost_its_weights_is_bad_not_gone(root, run):
    """Only the configuration is left: no layout would call that a checkpoint, but the manifest knows better."""
    path = write_safetensors(root, 100, seed=1)
    notes = PassNotes()
    reconcile(look(run), notes)
    (root / path / "model.safetensors").unlink()
    done = reconcile(look(run, QUICK.changed(unfinished_limit=0.0)), notes)
    assert [(c.path, c.outcome) for c in done.checked] == [(path, Outcome.BAD)]
    (root / path / "config.json").unlink()
    assert reconcile(look(run), notes).gone == (path,)


def test_old_temporaries_of_ours_are_collected_and_nothing_else(root, three):
    """A killed process leaves temporaries; after an hour they go. A trainer's own are never touched."""
    reconcile(look(three), PassNotes())
    ours = at(root, "_ckptguard/ledger/net-#.pt") / ".tmp-0123456789abcdef"
    staged = root / "tmp-rollback-0123abcd"
    theirs = root / "tmp-checkpoint-9"
    fresh = root / "_ckptguard" / ".tmp-4567456745674567"
    for folder in (staged, theirs):
        folder.mkdir()
    for file in (ours, fresh):
        file.write_bytes(b"x")
    for path in (ours, staged, theirs):
        os.utime(path, (1, 1))
    reconcile(look(three), PassNotes())
    assert [p.exists() for p in (ours, staged, theirs, fresh)] == [False, False, True, True]


def test_leftovers_that_cannot_be_removed_are_in_no_verdicts_way(three, monkeypatch):
    """Somebody else's rights on what a killed process left: it is told, and the pass goes on."""

    def denied(run, *, uploads):
        raise DeniedError("tmp-rollback-0123 may not be removed", key="tmp-rollback-0123")

    monkeypatch.setattr("ckptguard.upkeep.reconcile.collect_leftovers", denied)
    done = reconcile(look(three), PassNotes())
    assert any("may not be removed" in trouble for trouble in done.could_not_tell)
    assert str(find_known_good(three).id) == "300.1"


def test_odd_names_of_files(root, run):
    """Backslashes, spaces, newlines and marks in names are names like any other."""
    path = write_safetensors(root, 100, seed=1)
    for name in ("back\\slash.txt", "new\nline.json", "right\u202eleft", "sp ace"):
        (root / path / name).write_text("{}")
    for _ in range(2):
        reconcile(look(run), PassNotes())
    assert str(find_known_good(run).id) == "100.1"


NAMES = ("checkpoint-7.safetensors", "recovery-0-50.safetensors", "recovery-1-5.safetensors", "last.safetensors")


def test_every_door_takes_a_run_with_steps_of_all_kinds(tmp_path):
    """A pass judges them all, and `verify` and `list` take them."""
    for number, name in enumerate(NAMES):
        save_file(state_dict(number), tmp_path / name)
    done = reconcile(look(str(tmp_path)), PassNotes(), assume_quiet=True)
    assert {c.path: c.outcome for c in done.checked} == dict.fromkeys(NAMES, Outcome.GOOD)
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD
    assert {state.path for state in survey(look(str(tmp_path)))} == set(NAMES)


@pytest.fixture
def copies_fail(monkeypatch):
    """Have a listing fail when the pass comes to the copies."""

    def fail(view, **_):
        raise TransientError("kept: stale file handle", key="kept")

    monkeypatch.setattr("ckptguard.upkeep.reconcile.finish_copies", fail)


def test_verdicts_are_told_although_the_rest_of_the_pass_fails(three, copies_fail):
    """The trouble is told too; a pass that judged nothing fails as a whole."""
    notes = PassNotes()
    done = reconcile(look(three), notes)
    assert [c.step for c in done.checked] == [100, 200, 300]
    assert done.could_not_tell == ("kept: stale file handle",)
    with pytest.raises(StorageError):
        reconcile(look(three), notes)
