"""torch's own GradScaler: its scale is read, raised where it collapsed, and let be where it did not."""

import torch

from ckptguard.training.signals.device_signals import loss_scale, raise_loss_scale


def settled(scale):
    """A scaler that was in use."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    return scaler


def test_the_scale_is_read():
    """A number of an enabled scaler; None without one."""
    assert loss_scale(settled(8.0)) == 8.0
    assert loss_scale(torch.amp.GradScaler("cpu", init_scale=4.0)) == 4.0
    assert loss_scale(torch.amp.GradScaler("cpu", enabled=False)) is None
    assert loss_scale(None) is None


def test_a_collapsed_scale_is_raised():
    """Also before the first use; a higher one stays, and what is disabled or missing is no matter."""
    for scaler in (settled(2.0), torch.amp.GradScaler("cpu", init_scale=2.0)):
        raise_loss_scale(scaler, 256.0)
        assert scaler.get_scale() == 256.0
        assert scaler.scale(torch.ones(())).item() == 256.0
    high = settled(1024.0)
    raise_loss_scale(high, 256.0)
    assert high.get_scale() == 1024.0
    raise_loss_scale(torch.amp.GradScaler("cpu", enabled=False), 256.0)
    raise_loss_scale(None, 256.0)


def test_a_scaler_of_its_own_kind_is_let_be():
    """Where the state has no scale by that name, nothing is guessed."""

    class Own:
        def get_scale(self):
            return 1.0

        def state_dict(self):
            return {"mine": 1.0}

        def load_state_dict(self, state):
            raise AssertionError("nothing is to be loaded")

    raise_loss_scale(Own(), 256.0)
