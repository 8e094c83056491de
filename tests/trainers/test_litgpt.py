"""litgpt's own pretraining: a folder a step."""

import pytest
from support.trainers import Trainer, TrainerContract

pytestmark = [pytest.mark.trainers, pytest.mark.torch, pytest.mark.timeout(600)]
TRAINER = Trainer("litgpt_pretrain.py", ("step-*/lit_model.pth",), needs=("litgpt",), named=True)


class TestTrainer(TrainerContract):
    """What holds of every trainer."""

    @pytest.mark.xfail(strict=True, reason="demand 5: it looks below the whole run, and finds what is in quarantine")
    def test_poisoned_under_supervision_it_ends_finite_and_never_begins_again(self, training):
        """``rglob("step-*/*.pth")`` also finds RUN/_ckptguard/quarantine/.../step-00000003/lit_model.pth."""
        super().test_poisoned_under_supervision_it_ends_finite_and_never_begins_again(training)
