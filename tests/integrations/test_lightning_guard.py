"""Lightning: exact from an epoch's end, a harmful batch left out, and a last good file that is not deleted."""

from pathlib import Path

import pytest
from contracts.writers.launch import launch

pytestmark = [pytest.mark.writers, pytest.mark.timeout(300)]


def test_fit_goes_back(tmp_path):
    """All of it is asserted in a process of its own."""
    launch(str(Path(__file__).with_name("train_lightning.py")), "fit", tmp_path)


def test_the_last_good_one_is_not_deleted(tmp_path):
    """Nor for a save that is finite in memory and no good on the disk."""
    launch(str(Path(__file__).with_name("train_lightning.py")), "deleting", tmp_path)


def test_no_save_goes_unlooked_at(tmp_path):
    """Not those that come of a validation either."""
    launch(str(Path(__file__).with_name("train_lightning.py")), "validating", tmp_path)
