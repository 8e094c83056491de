"""Numbers on a device are judged without waiting for it, later, under their own step."""

import math

import pytest
import torch
from support.fake_device import Device

from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.signals import monitor, weights
from ckptguard.training.signals.device_signals import DeviceSignals
from ckptguard.training.signals.monitor import TrainingMonitor


@pytest.fixture
def device(monkeypatch):
    """A device that is busy until a test says otherwise."""
    made = Device()
    monkeypatch.setattr(monitor, "DeviceSignals", lambda say: DeviceSignals(say, every=4, mark=made.mark))
    monkeypatch.setattr(weights.PendingLook.__init__, "__kwdefaults__", {"mark": made.mark})
    return made


def watching(model=None, *, check_every=1000, **parts):
    """A watch over a model."""
    model = model if model is not None else torch.nn.Linear(2, 2)
    return TrainingMonitor(TrainingParts(model=model, **parts), RollbackPolicy(check_every=check_every))


def test_the_fake_counts_what_it_should(device):
    """The fake is worth something only if it sees every way of reading a number."""
    value = device.tensor(1.5)
    for read in (float, bool, torch.Tensor.item, type(value).tolist, type(value).cpu):
        before = device.waits
        read(value)
        assert device.waits > before, read
    before = device.waits
    torch.empty(()).copy_(value, non_blocking=True)
    device.tensor(0.0).copy_(value)
    (value + 1).isfinite()
    assert device.waits == before


def test_nothing_is_waited_for(device):
    """A thousand updates with loss and norm on a busy device: it is never waited for until its queue is full."""
    seen = watching()
    for step in range(1, 32):
        assert not seen.observe(step, device.tensor(1.0), device.tensor(2.0)).sick
    assert device.waits == 0
    device.done = True
    for step in range(32, 1000):
        assert not seen.observe(step, device.tensor([1.0]), device.tensor(2.0, dtype=torch.float16)).sick
    assert device.waits == 0
    assert [s.loss for s in device_rows(seen, device)] == [1.0] * 3


def device_rows(seen, device):
    """What had not been sent yet."""
    return seen._delayed.flush()


def test_the_onset_is_the_right_step(device):
    """A norm that was not finite at step 6 is known when the device has got there, and is told as of step 6."""
    seen = watching()
    for step in range(1, 13):
        seen.observe(step, device.tensor(1.0), device.tensor(math.inf if step == 6 else 2.0))
    assert seen.sick is None
    device.done = True
    seen.observe(13, device.tensor(1.0), device.tensor(2.0))
    assert (seen.sick.cause, seen.sick.step, seen.sick.onset_step) == ("grad_norm", 6, 6)
    assert device.waits == 0


def test_everything_is_read_before_a_save(device):
    """A look before a save waits for what is under way: nothing sick is saved because it was not read yet."""
    seen = watching()
    seen.observe(1, device.tensor(1.0), device.tensor(math.nan))
    assert seen.sick is None
    assert seen.look(1).sick is False  # the weights are fine; the norm was not
    assert (seen.sick.cause, seen.sick.step) == ("grad_norm", 1)
    assert device.waits == 1


def test_nan_losses_are_counted_late_too(device):
    """Five NaN losses in a row beside healthy weights act as of the first of them, and one look is enough."""
    seen = watching()
    for step in range(1, 9):
        seen.observe(step, device.tensor(math.nan if 3 <= step <= 7 else 1.0), device.tensor(0.0))
    device.done = True
    seen.observe(9, device.tensor(1.0), device.tensor(0.0))
    assert (seen.sick.cause, seen.sick.onset_step, seen.sick.step) == ("nan_loss", 3, 7)


def test_numbers_of_host_and_device_keep_their_order(device):
    """An update whose numbers are floats waits behind those that are not read yet."""
    seen = watching()
    seen.observe(1, device.tensor(1.0), 1.0)
    seen.observe(2, 3.0, math.inf)
    assert seen.sick is None
    device.done = True
    seen.flush()
    assert [signal.step for signal in seen._delayed.flush()] == []
    assert (seen.sick.step, seen.sick.onset_step) == (2, 2)


def test_a_rollback_forgets_what_is_under_way(device):
    """Numbers of updates that did not happen any more say nothing."""
    seen = watching()
    seen.observe(5, device.tensor(1.0), device.tensor(math.nan))
    seen.restart(2)
    device.done = True
    seen.observe(3, device.tensor(1.0), device.tensor(1.0))
    seen.flush()
    assert seen.sick is None


def test_a_loss_scale_on_the_device_is_not_read(device):
    """get_scale() would wait; five skips in a row are still seen."""

    class Scaler:
        def __init__(self):
            self._scale = device.tensor(1024.0)

        def get_scale(self):
            return self._scale.item()

    scaler = Scaler()
    seen = watching(scaler=scaler)
    for step in range(1, 12):
        if step > 4:
            scaler._scale = device.tensor(1024.0 / 2 ** (step - 4))
        seen.observe(step, device.tensor(1.0), device.tensor(math.inf if step > 4 else 1.0))
    device.done = True
    seen.observe(12, device.tensor(1.0), device.tensor(1.0))
    assert device.waits == 0
    assert (seen.sick.cause, seen.sick.onset_step, seen.sick.step) == ("loss_scale", 5, 9)


class Holder:
    """Something with a state_dict of tensors."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_look_at_the_weights_does_not_wait(device, bad):
    """Weights on a device are looked at behind training's back, and found poisoned when the answer has arrived."""
    content = torch.arange(9.0).reshape(3, 3)
    model = Holder(fine=device.tensor(torch.zeros(4)), w=device.tensor(content))
    if bad is not None:
        content[1, 2] = bad
    seen = watching(model, check_every=2)
    for step in range(1, 6):
        seen.after_step(step)
    assert device.waits == 0
    assert seen.sick is None
    device.done = True
    seen.after_step(6)
    if bad is None:
        assert device.waits == 0
        assert seen.sick is None
    else:
        assert seen.sick.evidence["tensor"] == "w"
        assert (seen.sick.cause, seen.sick.onset_step) == ("weights", 1)


def test_of_several_numbers_the_mean_counts():
    """One that is not finite is not lost in it."""
    seen = watching()
    assert not seen.observe(1, torch.tensor([1.0, 2.0]), True).sick
    assert seen.observe(2, 1.0, torch.tensor([1.0, math.nan])).sick
