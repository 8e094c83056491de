"""Going back: what is newer goes to quarantine, the known-good is in place and verified."""

import os
from pathlib import Path

import pytest
import torch
from support.faults import flip
from support.runs import QUICK, state_dict, write_torch
from support.views import look

from ckptguard.errors import BusyError, DeniedError, NoKnownGoodError, RefusedError, SettingsError, StorageError
from ckptguard.inspect.list_states import survey
from ckptguard.keep import quarantine as quarantine_module
from ckptguard.keep.quarantine import mark_suspect, quarantine
from ckptguard.records.kept import list_kept
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.work import Work
from ckptguard.scan import scan_files
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint
from ckptguard.verification.target import Selection, verify_target
from ckptguard.verification.user_decisions import clear, reseal


def visible(root):
    """Files of the run, ours aside."""
    return sorted(p.name for p in root.iterdir() if not p.name.startswith("_"))


def test_newer_ones_are_quarantined_and_the_good_among_them_suspect(root, three):
    """Going back before step 250 leaves 200 as the newest; 300 was GOOD and is SUSPECT now."""
    reconcile(look(three), PassNotes())
    done = roll_back(look(three), GoBack(reason="loss is NaN at 250", before_step=250, check_writing=False))
    assert (str(done.known_good.id), done.quarantined, done.put_back) == ("200.1", ("net-300.pt",), False)
    assert visible(root) == ["net-100.pt", "net-200.pt"]
    states = {str(s.id): s for s in survey(look(three))}
    assert states["300.1"].outcome is Outcome.SUSPECT
    assert states["300.1"].quarantined
    assert str(find_known_good(three).id) == "200.1"


def test_damage_with_kept_times_is_found_by_reading_and_skipped(root, three):
    """The newest was damaged after its verdict: the rollback reads it, calls it BAD and takes the one before."""
    reconcile(look(three, QUICK.changed(keep="link")), PassNotes())
    flip(root / "net-300.pt")
    assert str(find_known_good(three).id) == "300.1"
    done = roll_back(look(three), GoBack(reason="NaN", check_writing=False))
    assert str(done.known_good.id) == "200.1"
    assert {str(s.id): s.outcome for s in survey(look(three))}["300.1"] is Outcome.BAD


def test_older_ones_are_verified_when_the_known_good_turns_out_damaged(root, three):
    """Only the newest ever had a verdict: nothing below it was looked at, until it is found damaged."""
    verify_checkpoint(look(three), look(three).checkpoint("net-300.pt"))
    flip(root / "net-300.pt")
    assert str(roll_back(look(three), GoBack(reason="NaN", check_writing=False)).known_good.id) == "200.1"


def test_the_kept_copy_is_put_back_under_its_own_name(root, run):
    """Rotated away and needed again: the copy comes back whole, and is no link to the kept one."""
    write_torch(root, 100, seed=1)
    before = (root / "net-100.pt").read_bytes()
    reconcile(look(run), PassNotes())
    (root / "net-100.pt").unlink()
    done = roll_back(look(run), GoBack(reason="NaN", check_writing=False))
    assert done.put_back
    assert done.known_good.path == str(root / "net-100.pt")
    assert (root / "net-100.pt").read_bytes() == before
    assert os.stat(root / "net-100.pt").st_nlink == 1
    assert reconcile(look(run), PassNotes()).pending == ()
    assert str(find_known_good(run).id) == "100.1"


@pytest.mark.parametrize("left", [(), ("notes.txt",)])
def test_a_folder_that_a_rotation_left_makes_room_for_the_kept_copy(root, run, left):
    """An empty one goes. What else lies in it is moved aside with it, and never lost."""
    place = root / "step_100"
    place.mkdir()
    torch.save(state_dict(seed=1), place / "model.pt")
    before = (place / "model.pt").read_bytes()
    reconcile(look(run), PassNotes())
    (place / "model.pt").unlink()
    for name in left:
        (place / name).write_text("mine")
    done = roll_back(look(run), GoBack(reason="NaN", check_writing=False))
    assert done.put_back
    assert (place / "model.pt").read_bytes() == before
    assert len([path for path in root.rglob("*.txt*") if path.read_text() == "mine"]) == len(left)


def test_a_step_saved_again_after_a_rollback_is_known_good_again(root, three):
    """The next save of a quarantined step is a new generation, even with equal bytes."""
    watch = PassNotes()
    reconcile(look(three), watch)
    equal = (root / "net-300.pt").read_bytes()
    roll_back(look(three), GoBack(reason="NaN", before_step=300, check_writing=False))
    assert str(find_known_good(three).id) == "200.1"
    (root / "net-300.pt").write_bytes(equal)
    reconcile(look(three), watch)
    assert str(find_known_good(three).id) == "300.2"


def test_a_dry_run_changes_nothing(root, three):
    """It says what it would do, and every file and record stays."""
    reconcile(look(three, QUICK.changed(keep="link")), PassNotes())
    flip(root / "net-300.pt")
    before = sorted((p, p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file())
    done = roll_back(look(three), GoBack(reason="NaN", dry_run=True, check_writing=False))
    assert (str(done.known_good.id), done.quarantined, done.dry_run) == ("200.1", ("net-300.pt",), True)
    assert sorted((p, p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file()) == before


def test_it_refuses_while_training_writes(root, three):
    """Files written a moment ago mean that training may be running."""
    reconcile(look(three), PassNotes())
    with pytest.raises(BusyError):
        roll_back(look(three, QUICK.changed(settle=60.0)), GoBack(reason="NaN"))
    assert (
        str(roll_back(look(three, QUICK.changed(settle=60.0)), GoBack(reason="NaN", force=True)).known_good.id)
        == "300.1"
    )


def test_nothing_good_is_said_so(root, run):
    """A run whose only checkpoint is poisoned has nothing to go back to, and keeps its files."""
    state = state_dict(1)
    state["embed.weight"] = (state["embed.weight"].to(torch.float16) * 60000 * 60000).to(torch.float32)
    torch.save(state, root / "net-100.pt")
    reconcile(look(run), PassNotes())
    with pytest.raises(NoKnownGoodError):
        roll_back(look(run), GoBack(reason="NaN", check_writing=False))
    assert visible(root) == ["net-100.pt"]


def test_clear_lifts_suspicion_and_damage_cannot_be_cleared(root, three):
    """SUSPECT becomes GOOD with a reason, and stays so when it is verified again; BAD is refused."""
    reconcile(look(three), PassNotes())
    mark_suspect(look(three), CheckpointId("net-#.pt", 300, 1), "loss was NaN soon after")
    assert str(find_known_good(three).id) == "200.1"
    (root / "net-300.pt").touch()
    reconcile(look(three), PassNotes())
    assert str(find_known_good(three).id) == "200.1", "verifying again keeps the suspicion"
    assert clear(look(three), "300", reason="the NaN came from a masked batch").outcome is Outcome.GOOD
    assert str(find_known_good(three).id) == "300.1"
    flip(root / "net-200.pt")
    reconcile(look(three), PassNotes())
    (root / "net-200.pt").touch()
    reconcile(look(three), PassNotes())
    with pytest.raises(RefusedError):
        clear(look(three), "200", reason="no")


def test_a_crash_between_mark_and_move_is_mended(root, three, monkeypatch):
    """What was marked and not moved is moved in the next pass, not verified as a new save."""
    reconcile(look(three), PassNotes())

    def crash(*_):
        raise InterruptedError

    monkeypatch.setattr(quarantine_module, "_move_files", crash)
    with pytest.raises(InterruptedError):
        roll_back(look(three), GoBack(reason="NaN", before_step=300, check_writing=False))
    monkeypatch.undo()
    assert "net-300.pt" in visible(root)
    reconcile(look(three), PassNotes())
    assert visible(root) == ["net-100.pt", "net-200.pt"]
    assert str(find_known_good(three).id) == "200.1"


def test_pending_ones_are_verified_newest_first(root, three):
    """No daemon ever looked: the rollback verifies for itself, and stops at the first good one."""
    with open(root / "net-300.pt", "r+b") as file:
        file.truncate(50_000)
    done = roll_back(look(three), GoBack(reason="NaN", check_writing=False, dry_run=False))
    assert str(done.known_good.id) == "200.1"
    assert done.quarantined == ("net-300.pt",)
    assert {s.path: s.outcome for s in survey(look(three)) if s.in_place} == {
        "net-100.pt": Outcome.PENDING,
        "net-200.pt": Outcome.GOOD,
    }


def test_a_dry_run_says_what_would_be_verified_first(root, three):
    """A dry run writes no verdicts, so it cannot know them."""
    reconcile(look(three), PassNotes())
    write_torch(root, 400, seed=4)
    done = roll_back(look(three), GoBack(reason="NaN", dry_run=True, check_writing=False))
    assert (str(done.known_good.id), done.unverified) == ("300.1", ("net-400.pt",))


@pytest.mark.parametrize("keep", ["auto", "copy"])
def test_the_copy_that_was_gone_back_to_stays_known_good(root, three, keep):
    """The newest is damaged in place and has a copy of its own: it comes back, under its own id, and stays good."""
    before, settings = (root / "net-300.pt").read_bytes(), QUICK.changed(keep=keep)
    reconcile(look(three, settings), PassNotes())
    flip(root / "net-300.pt")
    done = roll_back(look(three, settings), GoBack(reason="NaN", check_writing=False))
    assert (str(done.known_good.id), done.put_back) == ("300.1", True)
    assert (root / "net-300.pt").read_bytes() == before
    for _ in range(2):
        reconcile(look(three, settings), PassNotes())
        assert str(find_known_good(three).id) == "300.1"
    assert list_kept(three)[-1] == CheckpointId("net-#.pt", 300, 1)


@pytest.mark.parametrize("name", ["move", "copy"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_failure_anywhere_keeps_the_good_copy(root, three, monkeypatch, name, call):
    """Whatever operation fails, once, in the middle of a rollback: afterwards there still is the same good content."""
    settings = QUICK.changed(keep="copy")
    before = (root / "net-300.pt").read_bytes()
    reconcile(look(three, settings), PassNotes())
    flip(root / "net-300.pt")
    real, calls = getattr(LocalStorage, name), []

    def failing(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise StorageError("I/O error", key=str(args[0]))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LocalStorage, name, failing)
    try:
        roll_back(look(three, settings), GoBack(reason="NaN", check_writing=False))
    except StorageError:
        pass
    monkeypatch.undo()
    reconcile(look(three, settings), PassNotes())
    answer = find_known_good(three)
    assert str(answer.id) == "300.1"
    with open(answer.path, "rb") as file:
        assert file.read() == before


def test_a_copy_stands_in_for_a_place_that_cannot_be_read(root, three):
    """An I/O error says nothing about the bytes: nothing bad is recorded, and the kept copy is read in its place."""
    settings = QUICK.changed(keep="copy")
    reconcile(look(three, settings), PassNotes())
    refused = []

    def scanner(storage, keys, options, progress):
        if not refused and keys == ("net-300.pt",):
            refused.append(keys)
            raise DeniedError("the disk says no", key=keys[0])
        return scan_files(storage, keys, options, progress)

    back = GoBack(reason="NaN", check_writing=False)
    done = roll_back(look(three, settings), back, work=Work(scanner=scanner))
    assert (str(done.known_good.id), done.put_back, len(refused)) == ("300.1", True, 1)
    assert {str(s.id): s.outcome for s in survey(look(three))}["300.1"] is Outcome.GOOD


def test_without_a_copy_an_older_one_is_taken_and_else_it_is_the_error(root, three):
    """Whoever could not read a checkpoint may not say that nothing good is left."""
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())

    def scanner(storage, keys, options, progress):
        if not options.structure_only and any(step in keys[0] for step in unreadable):
            raise DeniedError("the disk says no", key=keys[0])
        return scan_files(storage, keys, options, progress)

    unreadable = ("300", "200", "100")
    back = GoBack(reason="NaN", check_writing=False)
    with pytest.raises(DeniedError):
        roll_back(look(three), back, work=Work(scanner=scanner))
    unreadable = ("300", "200")
    done = roll_back(look(three), back, work=Work(scanner=scanner))
    assert (str(done.known_good.id), done.put_back) == ("100.1", False)


def test_only_the_named_one_is_gone_back_to(root, three):
    """If it is not good, no other one is taken for it."""
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())
    flip(root / "net-200.pt")
    back = GoBack(reason="NaN", to_id=CheckpointId("net-#.pt", 200, 1), check_writing=False)
    with pytest.raises(NoKnownGoodError, match=r"200\.1 to go back to"):
        roll_back(look(three), back)
    assert visible(root) == ["net-100.pt", "net-200.pt", "net-300.pt"]


def test_suspicion_follows_a_checkpoint_that_is_moved_back(root, three):
    """Quarantined as SUSPECT, moved back by hand and verified: still suspect, not moved again, until it is cleared."""
    reconcile(look(three), PassNotes())
    roll_back(look(three), GoBack(reason="NaN", before_step=300, check_writing=False))
    [moved] = (root / "_ckptguard" / "quarantine").rglob("*net-300.pt*")
    moved.rename(root / "net-300.pt")
    for _ in range(2):
        reconcile(look(three), PassNotes())
    assert (root / "net-300.pt").exists()
    assert str(find_known_good(three).id) == "200.1"
    clear(look(three), "300", reason="it was a masked batch")
    assert str(find_known_good(three).id) == "300.2"


def test_reseal_lifts_no_suspicion(three):
    """Taking the same bytes as a new generation does not make them trusted."""
    reconcile(look(three), PassNotes())
    mark_suspect(look(three), CheckpointId("net-#.pt", 300, 1), "sick soon after")
    assert reseal(look(three), "300").outcome is Outcome.SUSPECT
    assert str(find_known_good(three).id) == "200.1"


def test_two_paths_with_one_step_are_told_apart(root, run):
    """Quarantining one of two files of the same series and step does not make the other one new."""
    for epoch in (1, 2):
        torch.save(state_dict(epoch), root / f"epoch={epoch}-step=500.ckpt")
    reconcile(look(run), PassNotes())
    first = (root / "epoch=1-step=500.ckpt").read_bytes()
    flip(root / "epoch=1-step=500.ckpt")
    (root / "epoch=1-step=500.ckpt").touch()
    reconcile(look(run), PassNotes())
    quarantine(look(run), "epoch=2-step=500.ckpt", reason="test")
    report = verify_target(str(root), QUICK)
    assert [c.outcome for c in report.checkpoints] == [Outcome.BAD]
    found = find_known_good(run)  # the first good one of its series got bytes of its own at once
    with open(found.path, "rb") as file:
        assert (found.kept, file.read()) == (True, first)


def test_what_is_saved_while_the_known_good_is_read_is_quarantined_too(root, run):
    """Reading takes minutes, and a save in flight ends meanwhile: training would go on from it."""
    write_torch(root, 100, seed=1)
    reconcile(look(run), PassNotes())

    def scanner(storage, keys, options, progress):
        if not (root / "net-200.pt").exists():
            write_torch(root, 200, seed=2)
        return scan_files(storage, keys, options, progress)

    done = roll_back(look(run), GoBack(reason="NaN", check_writing=False), work=Work(scanner=scanner))
    assert (str(done.known_good.id), done.quarantined) == ("100.1", ("net-200.pt",))
    assert visible(root) == ["net-100.pt"]


def save(root: Path, epoch: int) -> None:
    """What WeNet leaves of an epoch."""
    torch.save(state_dict(epoch), root / f"epoch_{epoch}.pt")
    (root / f"epoch_{epoch}.yaml").write_text(f"tag: epoch_{epoch}\nstep: {epoch * 100}\nepoch: {epoch}\n")


@pytest.fixture
def epochs(root, run):
    """A WeNet run of three epochs."""
    (root / "train.yaml").write_text("encoder: conformer\n")
    for epoch in range(3):
        save(root, epoch)
    return run


def names(folder):
    """What lies in a folder, ours aside."""
    return sorted(p.name for p in Path(folder).iterdir() if not p.name.startswith("_"))


def test_damage_to_the_small_file_is_damage(root, epochs):
    """A resume takes step and epoch from it."""
    reconcile(look(epochs), PassNotes())
    times = os.stat(root / "epoch_2.yaml")
    (root / "epoch_2.yaml").write_text("tag: epoch_2\nstep: 900\nepoch: 2\n")
    os.utime(root / "epoch_2.yaml", ns=(times.st_atime_ns, times.st_mtime_ns))
    report = verify_target(str(root / "epoch_2.pt"), QUICK, Selection(wait=0))
    assert [c.outcome for c in report.checkpoints] == [Outcome.BAD]
    assert {f.file for f in report.checkpoints[0].findings if f.check == "digests"} == {"epoch_2.yaml"}


def test_without_the_small_file_it_is_not_finished(root, epochs):
    """WeNet writes it last."""
    (root / "epoch_2.yaml").unlink()
    done = reconcile(look(epochs), PassNotes())
    assert [w.path for w in done.pending] == ["epoch_2.pt"]


def test_a_rollback_moves_and_puts_back_both(root, epochs):
    """The newest was rotated away and a damaged one lies in its place: the pair comes back, the other pair goes."""
    before = {n: (root / n).read_bytes() for n in ("epoch_2.pt", "epoch_2.yaml")}
    reconcile(look(epochs), PassNotes())
    for name in before:
        (root / name).unlink()
    save(root, 3)
    flip(root / "epoch_3.pt")
    done = roll_back(look(epochs), GoBack(reason="NaN", check_writing=False))
    assert (str(done.known_good.id), done.put_back) == ("2.1", True)
    assert {n: (root / n).read_bytes() for n in before} == before
    assert "epoch_3.pt" not in names(root)
    assert "epoch_3.yaml" not in names(root)
    assert {str(s.id) for s in survey(look(epochs)) if s.quarantined} == {"3.1"}


def test_a_restore_brings_both(root, epochs, tmp_path):
    """Side by side, as they were."""
    reconcile(look(epochs), PassNotes())
    done = restore(look(epochs), str(tmp_path / "out"))
    assert done.path == str(tmp_path / "out" / "epoch_2.pt")
    for name in ("epoch_2.pt", "epoch_2.yaml"):
        assert (tmp_path / "out" / name).read_bytes() == (root / name).read_bytes()
    assert names(tmp_path / "out") == ["epoch_2.pt", "epoch_2.yaml"]


def test_pointers_that_lead_nowhere_are_told(root, epochs):
    """WeNet's own final.pt does in current versions. With such a `latest` DeepSpeed would start from scratch."""
    (root / "final.pt").symlink_to("2.pt")
    (root / "latest").write_text("global_step6")
    report = verify_target(str(root), QUICK, Selection(wait=0))
    assert report.outcome is Outcome.GOOD
    told = {"final.pt is a link to nothing", "latest names global_step6, which is not there"}
    assert set(report.notes) == told


def test_accelerates_own_folder_is_no_run(root):
    """A folder of ours in checkpoints/ would end Accelerate's next automatic save."""
    (root / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    torch.save(state_dict(1), root / "checkpoints" / "checkpoint_0" / "model.pt")
    with pytest.raises(SettingsError, match="reads a number in every name"):
        verify_target(str(root / "checkpoints"), QUICK, Selection(wait=0))
    assert open_run(str(root / "checkpoints"), QUICK.changed(records=str(root / "records"))).url.endswith("checkpoints")
    assert verify_target(str(root), QUICK, Selection(wait=0)).kind == "run"


def test_a_yaml_cut_in_a_line_is_incomplete(root, run):
    """A killed writer: a resume would miss the step, and start the schedule anew."""
    save(root, 2)
    text = (root / "epoch_2.yaml").read_text()
    (root / "epoch_2.yaml").write_text(text[: text.index("epoch: 2") + 4])
    assert verify_target(str(root), QUICK, Selection(wait=0)).outcome is Outcome.INCOMPLETE
