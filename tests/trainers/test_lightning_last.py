"""Lightning's ``last.ckpt`` beside its numbered files."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch, pytest.mark.timeout(600)]
TRAINER = Trainer("lightning_last.py", ("last.ckpt",), needs=("lightning",))


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
