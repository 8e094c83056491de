"""SpeechBrain's Brain and Checkpointer: folders named by the time."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch, pytest.mark.timeout(600)]
TRAINER = Trainer("speechbrain_brain.py", ("CKPT*/net.ckpt", "CKPT*/optimizer.ckpt"), needs=("speechbrain",))


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
