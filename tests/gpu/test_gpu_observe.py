"""Watching a training on a device adds no moment at which the host waits for it."""

import contextlib
import math
import re

import pytest
import torch
from support.guards import guarded
from torch.profiler import ProfilerActivity, profile, record_function

from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.signals import monitor, weights
from ckptguard.training.signals.device_signals import DeviceSignals, record_event

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]

# What the CUDA runtime calls when it waits; to wait for a mark (an event) that is behind costs nothing.
WAITS = re.compile(r"^cuda(Stream|Device)Synchronize|^cudaMemcpy(_v\d+)?$")
CYCLES = 500_000_000  # about a quarter of a second of work for the device


@contextlib.contextmanager
def no_waiting():
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def waited(monkeypatch):
    """The marks in the device's work that were waited for before the device had come there."""
    found = []

    class Mark:
        def __init__(self, device):
            self._event = record_event(device)

        def query(self):
            return self._event.query()

        def synchronize(self):
            if not self._event.query():
                found.append(self)
            self._event.synchronize()

    monkeypatch.setattr(monitor, "DeviceSignals", lambda say: DeviceSignals(say, mark=Mark))
    monkeypatch.setattr(weights.PendingLook.__init__, "__kwdefaults__", {"mark": Mark})
    return found


class Loop:
    """A training whose own updates never wait for the device: no number is read, and the scale is no reason to."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
        self.batches = [torch.randn(8, 32, device=device) for _ in range(8)]

    def guard(self, run):
        return guarded(run, self.model, self.optimizer, scaler=self.scaler, policy=RollbackPolicy(check_every=8))

    def update(self, batch):
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss, norm


def test_the_debug_mode_sees_what_waits(cuda):
    """The tests below are worth something only if reading a number is an error."""
    number = torch.ones((), device=cuda)
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        number.item()


def test_nothing_between_two_saves_waits(tmp_path, cuda, waited):
    """Neither `observe` with loss, norm and scale on the device nor a look at the weights, on a device that is behind:
    from the second update on, for the first one comes after a save."""
    loop = Loop(cuda)
    with contextlib.ExitStack() as quiet, loop.guard(tmp_path / "run") as guard:
        for step, batch in guard.steps(loop.batches, total=100, save_every=100):
            if step == 2:
                torch.cuda._sleep(CYCLES)
                quiet.enter_context(no_waiting())
            loss, norm = loop.update(batch)
            assert not guard.observe(loss=loss, grad_norm=norm).sick
            if step == 60:  # with many more the device would be so far behind that it is waited for
                break
        quiet.close()
    assert waited == []


def test_the_profiler_finds_no_waiting_in_observe(tmp_path, cuda, waited):
    """Of all calls to the CUDA runtime that happen within `observe`, none waits."""
    loop = Loop(cuda)
    with (
        loop.guard(tmp_path / "run") as guard,
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled,
    ):
        for step, batch in guard.steps(loop.batches, total=100, save_every=100):
            loss, norm = loop.update(batch)
            with record_function("observe"):
                guard.observe(loss=loss, grad_norm=norm)
            if step == 50:
                break
        with record_function("read"):
            loss.item()
    assert waits_within(profiled, "read"), "the profiler sees no waiting at all: this test looks at nothing"
    assert waits_within(profiled, "observe") == []
    assert waited == []


def waits_within(profiled, name):
    """The calls that wait and begin within a range of this name on the host."""
    events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CPU]
    ranges = [e.time_range for e in events if e.name == name]
    assert ranges, f"nothing of {name} was profiled"
    return [
        e.name for e in events if WAITS.match(e.name) and any(r.start <= e.time_range.start <= r.end for r in ranges)
    ]


def test_an_infinite_norm_is_told_as_of_its_own_update(cuda):
    """It is known when the device has got there, and is told as of the update that it was of."""
    model = torch.nn.Linear(2, 2).to(cuda)
    seen = monitor.TrainingMonitor(TrainingParts(model=model), RollbackPolicy(check_every=1000))
    with no_waiting():
        for step in range(1, 30):
            norm = torch.full((), math.inf if step == 6 else 2.0, device=cuda)
            seen.observe(step, torch.ones((), device=cuda), norm)
    seen.flush()
    assert (seen.sick.cause, seen.sick.onset_step) == ("grad_norm", 6)
