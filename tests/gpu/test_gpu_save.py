"""What lies on a device is saved as it was at the call, and what is loaded to a device is what was saved."""

import pytest
import torch
from support.device_training import bits
from support.faults import flip
from support.guards import guarded
from support.runs import QUICK

from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

FLOATS = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
OTHERS = ("int64", "int32", "int16", "int8", "uint8", "bool", "complex64")
CYCLES = 500_000_000  # about a quarter of a second of work for the device


class EveryKind(torch.nn.Module):
    """Parameters of three types, one of them under two names, and buffers of every type and form."""

    def __init__(self, seed):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        for name in ("float32", "bfloat16", "float16"):
            weight = torch.randn(65, 33, generator=draw).to(getattr(torch, name))
            self.register_parameter(f"weight_{name}", torch.nn.Parameter(weight))
        self.tied = self.weight_float32
        for name in FLOATS:
            self.register_buffer(f"buffer_{name}", torch.randn(1000, 7, generator=draw).to(getattr(torch, name)))
        for name in OTHERS:
            whole = torch.randint(0, 2, (501,), generator=draw)
            self.register_buffer(f"buffer_{name}", whole.to(getattr(torch, name)))
        self.register_buffer("turned", torch.randn(40, 30, generator=draw).t())
        self.register_buffer("conjugated", torch.randn(9, dtype=torch.complex64, generator=draw).conj())
        self.register_buffer("single", torch.randn((), generator=draw))
        self.register_buffer("empty", torch.empty(0, 4))

    def loss(self):
        return sum(weight.float().square().mean() for weight in self.parameters())


def made(device, seed):
    """A model on the device, and its optimizer after an update."""
    model = EveryKind(seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)  # what fp16 tells from zero
    model.loss().backward()
    optimizer.step()
    return model, optimizer


def content(model, optimizer):
    """The bits of all tensors, with where they lie."""
    found = {name: (str(tensor.device), bits(tensor)) for name, tensor in model.state_dict().items()}
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"{number}.{key}": (str(value.device), bits(value)) for key, value in state.items()}
    return found


@pytest.mark.parametrize("blocking", [True, False])
def test_what_is_loaded_is_what_was_saved(tmp_path, device, blocking):
    """Every tensor of every type lies on the device again, bit for bit, verified on the way."""
    model, optimizer = made(device, seed=1)
    before = content(model, optimizer)
    guard = guarded(tmp_path / "run", model, optimizer)
    guard.save(step=1, blocking=blocking)
    assert guard.wait_for_save()
    other, its = made(device, seed=2)
    assert content(other, its) != before
    assert guarded(tmp_path / "run", other, its).resume() == 1
    assert content(other, its) == before
    assert other.tied.data_ptr() == other.weight_float32.data_ptr()
    assert verify_target(str(tmp_path / "run"), QUICK).outcome is Outcome.GOOD


def test_damage_never_reaches_a_training(tmp_path, device):
    """What was flipped on the disk is noticed while it is loaded to the device, and the save before it is taken."""
    model, optimizer = made(device, seed=1)
    guard = guarded(tmp_path / "run", model, optimizer)
    guard.save(step=1)
    before = content(model, optimizer)
    model.loss().backward()
    optimizer.step()
    guard.save(step=2)
    for file in ("model.safetensors", "optimizer.safetensors"):
        flip(tmp_path / "run" / "step-000000002" / file, -1, new_times=True)
    assert guard.resume() == 1
    assert content(model, optimizer) == before


@pytest.mark.parametrize("busy", [False, True])
def test_a_save_behind_training_is_of_the_moment_when_it_was_called(tmp_path, device, busy):
    """What the device does after the call is not in it, and what it was still to do before the call is."""
    model, optimizer = made(device, seed=1)
    guard = guarded(tmp_path / "run", model, optimizer)
    if busy and device.type == "cuda":
        torch.cuda._sleep(CYCLES)
    model.loss().backward()
    optimizer.step()
    guard.save(step=1, blocking=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(77)
    assert guard.wait_for_save()
    expected, its = made(device, seed=1)
    expected.loss().backward()
    its.step()
    assert guard.resume() == 1
    assert content(model, optimizer) == content(expected, its)


def test_the_copy_lies_in_pinned_memory_that_is_used_again(tmp_path, cuda):
    """The device copies into it by itself, and no save after the first one makes memory."""
    model, optimizer = made(cuda, seed=1)
    guard, places = guarded(tmp_path / "run", model, optimizer), set()
    for step in range(1, 4):
        guard.save(step=step, blocking=False)
        memory = guard._store._host._memory
        assert memory.is_pinned()
        places.add(memory.data_ptr())
        assert guard.wait_for_save()
    assert len(places) == 1


def test_where_nothing_can_be_pinned_it_is_saved_all_the_same(tmp_path, cuda, monkeypatch):
    """More than may be locked: the copy lies in memory of the usual kind."""
    real = torch.empty

    def empty(*arguments, pin_memory=False, **options):
        if pin_memory and options.get("dtype") is torch.uint8:
            raise RuntimeError("CUDA error: out of memory")
        return real(*arguments, pin_memory=pin_memory, **options)

    model, optimizer = made(cuda, seed=1)
    before = content(model, optimizer)
    guard = guarded(tmp_path / "run", model, optimizer)
    monkeypatch.setattr(torch, "empty", empty)
    guard.save(step=1, blocking=False)
    assert not guard._store._host._memory.is_pinned()
    assert guard.wait_for_save()
    monkeypatch.undo()
    assert guard.resume() == 1
    assert content(model, optimizer) == before


@pytest.mark.parametrize("blocking", [True, False])
def test_a_stream_of_trainings_own_is_saved_and_put_back_in_order(tmp_path, cuda, blocking):
    """Work that is still under way on it when a save begins is in the save, and when a load begins it does not come
    over what was loaded."""
    model, optimizer = made(cuda, seed=1)
    guard = guarded(tmp_path / "run", model, optimizer)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES)
        with torch.no_grad():
            model.weight_float32.fill_(1)
        guard.save(step=1, blocking=blocking)
        assert guard.wait_for_save()
        torch.cuda._sleep(CYCLES)
        with torch.no_grad():
            model.weight_float32.fill_(2)
        assert guard.resume() == 1
    torch.cuda.synchronize()
    assert model.weight_float32.unique().tolist() == [1.0]
