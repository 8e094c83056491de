"""detectron2: numbers, rotated, and a file that names the last."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch]
TRAINER = Trainer("detectron2.py", ("model_0*.pth", "model_final.pth"), named=True)


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
