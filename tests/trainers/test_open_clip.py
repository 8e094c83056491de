"""open_clip's own training main: ``epoch_latest.pt``."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch, pytest.mark.timeout(600)]
TRAINER = Trainer(
    "open_clip_train_main.py", ("epoch_latest.pt",), needs=("open_clip_train",), run="logs/exp/checkpoints"
)


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
