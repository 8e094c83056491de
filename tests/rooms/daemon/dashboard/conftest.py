"""Dashboards that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dashboards import Dashboard, Opener
from support.tiny_run import forget, save


@pytest.fixture
def open_dashboard(short_folder: Path) -> Iterator[Opener]:
    """Open dashboards over runs."""
    opened: list[Dashboard] = []

    def one(*urls: str, **options: Any) -> Dashboard:
        folder = short_folder / str(len(opened))
        folder.mkdir(mode=0o700)
        opened.append(Dashboard(folder, *urls, **options))
        return opened[-1]

    yield one
    for dashboard in opened:
        dashboard.close()


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A run of three checkpoints, local or in a store."""
    (tmp_path / "run").mkdir()
    found = str(tmp_path / "run") if request.param == "local" else f"memory://dashboard-{tmp_path.name}"
    for step in (1, 2, 3):
        save(found, step, step)
    yield found
    forget(found)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The same on a local disk only."""
    (tmp_path / "run").mkdir()
    for step in (1, 2, 3):
        save(str(tmp_path / "run"), step, step)
    return str(tmp_path / "run")
