"""nanoGPT: one name, saved over in place."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch]
TRAINER = Trainer("nanogpt.py", ("ckpt.pt",))


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
