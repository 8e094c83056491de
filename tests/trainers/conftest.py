"""A run of each trainer, trained once beside a daemon, and one that is yet to be trained."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("support.trainers")

from support.trainers import Training, train_beside_daemon  # noqa: E402 - its assertions are to be told in full


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the others to ``pytest -m trainers``, to the long campaigns, and to whoever has the packages."""
    full = os.environ.get("CKPTGUARD_CAMPAIGN") == "full" or "CKPTGUARD_TRAINERS" in os.environ
    if full or "trainers" in config.option.markexpr:
        return
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.callspec.params["trainer"].always:
            item.add_marker(pytest.mark.skip(reason="it takes long: pytest -m trainers"))


@pytest.fixture(scope="module")
def trained(trainer, tmp_path_factory):
    """A run to its end, each save judged by a daemon. Never change it: copy it."""
    return train_beside_daemon(trainer, tmp_path_factory.mktemp("trained"))


@pytest.fixture
def training(trainer, tmp_path):
    """A run that has not begun."""
    made = Training(trainer, tmp_path / "training")
    made.folder.mkdir()
    return made
