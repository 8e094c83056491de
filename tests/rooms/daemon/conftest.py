"""Daemons that end with their test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon_process import DaemonProcess, Starter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An empty run."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder of mode 0700 with a short path, for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="cg-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(short_folder: Path) -> Iterator[Starter]:
    """Starts daemons; what still runs after the test is killed."""
    started: list[DaemonProcess] = []

    def start_one(*runs: Path, **how: Any) -> DaemonProcess:
        started.append(DaemonProcess(short_folder, *runs, **how))
        return started[-1]

    yield start_one
    for daemon in started:
        daemon.kill()
        print(daemon.log_path.read_text())  # shown when the test failed
