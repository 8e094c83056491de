"""Fixtures: daemons that end with their test, and a place for their sockets."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from support.daemon_process import DaemonProcess, Starter

_Kind = TypeVar("_Kind", bound=DaemonProcess)


@contextlib.contextmanager
def ended(kind: type[_Kind], folder: Path) -> Iterator[Callable[..., _Kind]]:
    """Starts daemons; what still runs at the end of the block is killed."""
    started: list[_Kind] = []

    def start_one(*runs: Path, **how: Any) -> _Kind:
        started.append(kind(folder, *runs, **how))
        return started[-1]

    yield start_one
    for daemon in started:
        daemon.kill()
        print(daemon.log_path.read_text())  # shown when the test failed


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder of mode 0700 with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="cg-") as folder:
        yield Path(folder)


@pytest.fixture
def start(short_folder: Path) -> Iterator[Starter]:
    """Starts daemons; what still runs after the test is killed."""
    with ended(DaemonProcess, short_folder) as start_one:
        yield start_one
