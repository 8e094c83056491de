"""DINOv2: a file and a pointer for each rank, the step before the rank."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch]
TRAINER = Trainer("dinov2.py", ("model_0000399.rank_?.pth",), named=True)


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
