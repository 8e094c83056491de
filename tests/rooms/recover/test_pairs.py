"""Checkpoints of two files side by side (WeNet's .pt and .yaml): kept, moved, restored and judged as one."""

import os
from pathlib import Path

import pytest
import torch
from support.faults import flip
from support.runs import QUICK, state_dict
from support.views import look

from ckptguard.errors import SettingsError
from ckptguard.inspect.list_states import survey
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import Selection, verify_target


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


def test_both_files_are_one_checkpoint(epochs):
    """GOOD, and the manifest names the pair."""
    reconcile(look(epochs), PassNotes())
    good = find_known_good(epochs)
    assert (str(good.id), good.path) == ("2.1", epochs.usable("epoch_2.pt"))


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


def test_a_link_to_nothing_is_told(root, epochs):
    """WeNet's own final.pt leads nowhere in current versions."""
    (root / "final.pt").symlink_to("2.pt")
    report = verify_target(str(root), QUICK, Selection(wait=0))
    assert report.outcome is Outcome.GOOD
    assert report.notes == ("final.pt is a link to nothing",)


def test_latest_that_names_nothing_is_told(root, epochs):
    """DeepSpeed would start from scratch."""
    (root / "latest").write_text("global_step6")
    report = verify_target(str(root), QUICK, Selection(wait=0))
    assert report.notes == ("latest names global_step6, which is not there",)


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
