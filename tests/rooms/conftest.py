"""A run with real checkpoints, on disk."""

import pytest
from support.runs import write_torch

from ckptguard.records.run import open_run


@pytest.fixture
def root(tmp_path):
    """An empty run's folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def run(root):
    """The run, opened."""
    return open_run(str(root))


@pytest.fixture
def three(root, run):
    """A run with torch files of steps 100, 200 and 300."""
    for step in (100, 200, 300):
        write_torch(root, step, seed=step)
    return run
