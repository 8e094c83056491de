"""Every layout, written with torch: recognised, GOOD without a warning, and it goes through keep, restore, rollback."""

import os
import shutil
import time
from pathlib import Path

import pytest
from support.layouts import LAYOUT_OF, LAYOUT_WRITERS
from support.runs import QUICK
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.checkpoint import verify_checkpoint
from ckptguard.verification.target import Selection, verify_target


def content(folder: Path, top: str) -> dict[str, bytes]:
    """Files of a checkpoint by relative path, with those beside it that share its stem."""
    stem = top.rsplit(".", 1)[0]
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and (str(p.relative_to(folder)).split(os.sep)[0] in (top, stem + ".yaml"))
    }


@pytest.mark.parametrize("kind", sorted(LAYOUT_WRITERS))
def test_a_clean_run_is_good_and_goes_back(kind, tmp_path):
    """Three steps; the newest is lost to rotation and comes back from its kept copy; a restore equals it."""
    root = tmp_path / "run"
    paths = [LAYOUT_WRITERS[kind](root, step, step) for step in (100, 200, 300)]
    run = open_run(str(root))
    done = reconcile(look(run), PassNotes())
    assert [(c.path, c.layout, c.step) for c in done.checked] == [
        (path, LAYOUT_OF[kind], step) for path, step in zip(paths, (100, 200, 300), strict=True)
    ]
    for checked in done.checked:
        heavy = [f for f in checked.findings if f.severity is not Severity.NOTICE]
        assert (checked.outcome, heavy) == (Outcome.GOOD, [])
    before = content(root, paths[2])
    assert before
    restored = restore(look(run), str(tmp_path / "out"))
    assert content(tmp_path / "out", os.path.basename(restored.path)) == before
    if (root / paths[2]).is_dir():
        shutil.rmtree(root / paths[2])
    else:
        for name in before:
            (root / name).unlink()
    assert find_known_good(run).kept
    back = roll_back(look(run), GoBack(reason="test", check_writing=False))
    assert (back.known_good.step, back.put_back) == (300, True)
    assert content(root, paths[2]) == before


@pytest.mark.parametrize("kind", sorted(LAYOUT_WRITERS))
def test_a_step_saved_again_is_a_new_generation(kind, tmp_path):
    """The trainer went back and came to step 200 once more: GOOD, as 200.2."""
    root = tmp_path / "run"
    for step in (100, 200):
        path = LAYOUT_WRITERS[kind](root, step, step)
    run = open_run(str(root))
    reconcile(look(run), PassNotes())
    LAYOUT_WRITERS[kind](tmp_path / "again", 200, 999)
    shutil.copytree(tmp_path / "again", root, dirs_exist_ok=True, copy_function=shutil.copyfile)
    checked = verify_checkpoint(look(run), look(run).checkpoint(path))
    assert (str(checked.id), checked.outcome) == ("200.2", Outcome.GOOD), checked.findings


def test_a_first_save_killed_before_its_metadata_is_incomplete(tmp_path):
    """Nothing explains the files yet: INCOMPLETE, not BAD."""
    path = LAYOUT_WRITERS["dcp"](tmp_path, 100, 1)
    (tmp_path / path / ".metadata").unlink()
    report = verify_target(str(tmp_path / path), QUICK, Selection(wait=0))
    assert report.outcome is Outcome.INCOMPLETE


def test_metadata_that_is_a_link_is_bad(tmp_path):
    """It is not followed, and the checkpoint has no other."""
    path = LAYOUT_WRITERS["dcp"](tmp_path, 100, 1)
    (tmp_path / path / ".metadata").rename(tmp_path / "elsewhere")
    (tmp_path / path / ".metadata").symlink_to(tmp_path / "elsewhere")
    report = verify_target(str(tmp_path / path), QUICK, Selection(wait=0))
    assert report.outcome is Outcome.BAD


@pytest.mark.parametrize("times", ["kept", "new"])
@pytest.mark.parametrize(
    ("kind", "old"),
    [("accelerate", "optimizer.bin"), ("trainer", "model.safetensors"), ("dcp", "*.distcp"), ("zero2", "*rank_1*")],
)
def test_a_copied_run_saved_again_in_part_is_not_good(kind, old, times, tmp_path):
    """Every file of a copy has another inode, and perhaps another time: that does not make the old ones new."""
    root = tmp_path / "run"
    for step in (100, 200):
        path = LAYOUT_WRITERS[kind](root, step, step)
    reconcile(look(open_run(str(root))), PassNotes())
    LAYOUT_WRITERS[kind](tmp_path / "again", 200, 999)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, copy_function=shutil.copy2 if times == "kept" else shutil.copyfile)
    left_out = max((copy / path).glob(old), key=lambda p: p.stat().st_size)
    if times == "new":
        os.utime(left_out, (time.time() - 3600, time.time() - 3600))  # when the run was copied
    for place in set((copy / path).iterdir()) - {left_out}:
        shutil.copyfile(tmp_path / "again" / path / place.name, place)
    run = open_run(str(copy))
    checked = verify_checkpoint(look(run), look(run).checkpoint(path))
    assert (str(checked.id), checked.outcome) == ("200.1", Outcome.BAD), checked.findings


def test_frozen_weights_saved_again_are_no_damage(tmp_path):
    """The same file lies in every step; all files were written anew."""
    root = tmp_path / "run"
    for step in (100, 200):
        path = LAYOUT_WRITERS["trainer"](root, step, step)
        shutil.copyfile(root / "checkpoint-100/model.safetensors", tmp_path / "frozen")
        shutil.copyfile(tmp_path / "frozen", root / path / "vision_tower.safetensors")
    run = open_run(str(root))
    reconcile(look(run), PassNotes())
    LAYOUT_WRITERS["trainer"](tmp_path / "again", 200, 999)
    shutil.copyfile(tmp_path / "frozen", tmp_path / "again" / path / "vision_tower.safetensors")
    shutil.copytree(tmp_path / "again", root, dirs_exist_ok=True, copy_function=shutil.copyfile)
    checked = verify_checkpoint(look(run), look(run).checkpoint(path))
    assert (str(checked.id), checked.outcome) == ("200.2", Outcome.GOOD), checked.findings
