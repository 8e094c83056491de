"""Ultralytics' own training: ``last.pt``, in place, a whole pickled module."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch, pytest.mark.timeout(600)]
TRAINER = Trainer("ultralytics_classify.py", ("last.pt",), needs=("ultralytics",), run="runs/exp/weights")


class TestTrainer(TrainerContract):
    """What holds of every trainer."""
