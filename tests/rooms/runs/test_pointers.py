"""Pointers beside checkpoints follow a rollback, and nothing else ever changes them."""

import shutil

import pytest
from support.runs import write_safetensors, write_torch
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.upkeep.reconcile import PassNotes, reconcile


def back(folder, **how):
    """Go back in a run, and the names in it afterwards."""
    roll_back(look(open_run(str(folder))), GoBack(reason="test", check_writing=False, **how))
    return sorted(p.name for p in folder.iterdir() if p.name != "_ckptguard")


@pytest.fixture
def tags(tmp_path):
    """Three verified folders and a pointer to the newest, as DeepSpeed leaves them."""
    run = tmp_path / "run"
    for step in (100, 200, 300):
        write_safetensors(run, step, seed=step)
    (run / "latest").write_text("model-300")
    reconcile(look(open_run(str(run))), PassNotes())
    return run


def test_a_pointer_to_what_was_quarantined_names_the_known_good_one(tags):
    """A trainer that follows it finds the good one; no temporary stays."""
    assert back(tags, before_step=300) == ["latest", "model-100", "model-200"]
    assert (tags / "latest").read_text() == "model-200"


def test_a_pointer_to_what_is_there_or_to_something_else_stays(tags):
    """Whatever names another series, or nothing that could be a name, is the trainer's own business."""
    (tags / "latest").write_text("model-100\n")
    back(tags, before_step=300)
    assert (tags / "latest").read_text() == "model-100\n"
    for text in ("epoch_7", "../run/model-300", "", "model-300\nmodel-200"):
        (tags / "latest").write_text(text)
        back(tags)
        assert (tags / "latest").read_text() == text


def test_a_pointer_that_is_a_link_is_not_written_through(tags, tmp_path):
    """What it leads to may be anybody's."""
    (tmp_path / "outside").write_text("model-300")
    (tags / "latest").unlink()
    (tags / "latest").symlink_to(tmp_path / "outside")
    back(tags, before_step=300)
    assert (tmp_path / "outside").read_text() == "model-300"


def test_a_dry_run_leaves_pointers_alone(tags):
    """It says what would be done, and does nothing."""
    back(tags, before_step=300, dry_run=True)
    assert (tags / "latest").read_text() == "model-300"


def test_a_pointer_is_mended_after_a_crash_in_between(tags):
    """Going back again, when everything is quarantined already, still finds the pointer that was left."""
    back(tags, before_step=300)
    (tags / "latest").write_text("model-300")
    back(tags)
    assert (tags / "latest").read_text() == "model-200"


def test_megatrons_tracker_file_holds_the_number(tmp_path):
    """It names an iteration, not a folder."""
    run = tmp_path / "run"
    for step in (100, 200):
        write_torch(run / f"iter_{step:07d}" / "mp_rank_00", step, seed=step)
        shutil.move(
            run / f"iter_{step:07d}/mp_rank_00/net-{step}.pt", run / f"iter_{step:07d}/mp_rank_00/model_optim_rng.pt"
        )
    (run / "latest_checkpointed_iteration.txt").write_text("200")
    reconcile(look(open_run(str(run))), PassNotes())
    back(run, before_step=200)
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "100"
