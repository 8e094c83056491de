"""Daemons that end with their test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptguard_daemon.log import also_to
from ckptguard_daemon.metrics import Counts
from support.daemon_fixtures import short_folder, start  # noqa: F401


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An empty run."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def counts() -> Iterator[Counts]:
    """Counts of what this test logs."""
    ours, one = logging.getLogger("ckptguard_daemon"), Counts()
    level = ours.level
    ours.setLevel(logging.INFO)
    also_to(one)
    yield one
    ours.removeHandler(one)
    ours.setLevel(level)
