"""DINO and scripts like it: one name in place, and now and then a number."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch]
TRAINER = Trainer("dino.py", ("checkpoint.pth",))


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
