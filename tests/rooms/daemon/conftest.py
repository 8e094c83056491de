"""Daemons that end with their test."""

from pathlib import Path

import pytest
from support.daemon_fixtures import short_folder, start  # noqa: F401


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An empty run."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder
