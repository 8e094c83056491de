"""litgpt's own pretraining: a folder a step."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch, pytest.mark.timeout(600)]
TRAINER = Trainer("litgpt_pretrain.py", ("step-*/lit_model.pth",), needs=("litgpt",), named=True)


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
