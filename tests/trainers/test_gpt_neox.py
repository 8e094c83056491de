"""GPT-NeoX: DeepSpeed's folders with a file for each layer, and ``latest``."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch]
TRAINER = Trainer("gpt_neox.py", ("global_step*/*_states.pt",), named=True)


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
