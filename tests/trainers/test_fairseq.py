"""fairseq: two numbers in a name, and a copy under a fixed one."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch]
TRAINER = Trainer("fairseq.py", ("checkpoint_last.pt",))


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
