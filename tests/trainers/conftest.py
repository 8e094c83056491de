"""A run of the module's trainer, trained once beside a daemon, and one that is yet to be trained."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("support.trainers")

from support.trainers import Training, train_beside_daemon  # noqa: E402 - its assertions are to be told in full


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """A run to its end, each save judged by a daemon. Never change it: copy it."""
    request.module.TRAINER.skip_unless_there()
    return train_beside_daemon(request.module.TRAINER, tmp_path_factory.mktemp("trained"))


@pytest.fixture
def training(request, tmp_path):
    """A run that has not begun."""
    request.module.TRAINER.skip_unless_there()
    made = Training(request.module.TRAINER, tmp_path / "training")
    made.folder.mkdir()
    return made
