"""MMEngine: epochs, rotated, a best one, and a file that names the last."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch]
TRAINER = Trainer("mmengine.py", ("epoch_*.pth",), named=True)


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
