"""timm: its own saver and resume; hard links, and two numbers in a name."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch, pytest.mark.timeout(600)]
TRAINER = Trainer("timm_train.py", ("last.pth.tar",), needs=("timm",))


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
