"""A browser for every test of this folder. Without one all are skipped; in CI there must be one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers.fixtures import skip_or_fail
from servers.processes import NotInstalledError
from support.browsing import Dashboard, Watched, chromium, missing
from support.daemon_fixtures import ended


@pytest.fixture(scope="module")
def browser():
    """Debian's chromium."""
    wanted = missing()
    if wanted is not None:
        skip_or_fail(NotInstalledError(wanted))
    with chromium() as started:
        yield started


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An empty run."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def serve(browser) -> Iterator[Callable[..., Dashboard]]:
    """Starts daemons with their page; what still runs after the test is killed."""
    with tempfile.TemporaryDirectory(prefix="cg-") as folder, ended(Dashboard, Path(folder)) as start:
        yield start


@pytest.fixture
def look(browser) -> Iterator[Callable[..., Watched]]:
    """Opens profiles of the browser. In the end, nothing has gone wrong in any of them."""
    opened: list[Watched] = []

    def new(daemon: Dashboard, **how: object) -> Watched:
        opened.append(Watched(browser, daemon, **how))
        return opened[-1]

    yield new
    wrong = [one for watched in opened for one in watched.wrong]
    for watched in opened:
        watched.context.close()
    assert wrong == []
