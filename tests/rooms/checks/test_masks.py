"""What of infinities is a mask, and what is sickness."""

from pathlib import Path

import pytest
import torch

import ckptguard
from ckptguard.errors import SickTrainingError
from ckptguard.training.signals.weights import first_non_finite, first_non_finite_state
from ckptguard.values.masks import may_be_mask
from ckptguard.values.settings import Settings

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("values", "sick"),
    [
        ([0.0, -INF, -INF], False),
        ([1.0, 1.0, -INF], False),
        ([0.0, 1.0, -INF], True),
        ([0.0, 0.0, INF], True),
        ([-INF, -INF, -INF], True),
        ([0.0, -INF, NAN], True),
        ([1.0, 2.0, 3.0], False),
    ],
)
def test_a_mask_is_one_finite_value_beside_minus_infinity(values, sick, dtype):
    """In every type; NaN, +Inf, or two finite values are none."""
    model = torch.nn.Module()
    model.register_buffer("held", torch.tensor(values).to(dtype))
    assert first_non_finite(model) == ("held" if sick else None)


def test_what_is_learnt_is_no_mask():
    """A bias of zeros of which one became -Inf looks like a mask; so do moments."""
    layer = torch.nn.Linear(2, 4)
    torch.nn.init.zeros_(layer.bias)
    layer.bias.data[2] = -INF
    assert first_non_finite(layer) == "bias"
    layer.bias.requires_grad_(False)
    assert first_non_finite(layer) == "bias"  # as whoever reads the file later would say, who sees names only
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[layer.bias]["momentum_buffer"] = torch.tensor([0.0, -INF])
    assert first_non_finite_state(optimizer) == "optimizer.state.0.momentum_buffer"


@pytest.mark.parametrize(
    ("name", "dimensions", "possible"),
    [
        ("h.0.attn.mask", 2, True),
        ("h.0.attn.bias", 4, True),  # old GPT-2's
        ("h.0.attn.masked_bias", 0, True),
        ("final_logits_bias", 2, True),
        ("alibi.slopes", 1, True),
        ("weight_mask", 2, True),
        ("bias", 1, False),
        ("h.0.attn.bias", 1, False),
        ("h.0.attn.in_proj_bias", 1, False),
        ("h.0.attn.c_attn.weight", 2, False),
        ("q.lora_A.default.weight", 2, False),
        ("q.lora_B", 2, False),
        ("o.state.1.exp_avg", 1, False),
        ("o.state.1.momentum_buffer", 3, False),
    ],
)
def test_names_that_tell_what_is_learnt(name: str, dimensions: int, possible: bool) -> None:
    """A weight, an adapter and a moment are never masks; a bias is one only where it is no vector."""
    assert may_be_mask(name, dimensions) is possible


class Both:
    """Two optimizers in one object, as the hint for several of them says."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def state_dict(self) -> dict[str, object]:
        return {name: one.state_dict() for name, one in zip("ab", self.optimizers, strict=True)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        for name, one in zip("ab", self.optimizers, strict=True):
            one.load_state_dict(state[name])


@pytest.mark.parametrize("blocking", [True, False])
def test_moments_of_two_optimizers_in_one_object(tmp_path: Path, blocking: bool) -> None:
    """What is in its state_dict is looked at, and not saved when it is poisoned; what is allowed is."""
    model = torch.nn.Linear(2, 2)
    both = Both(torch.optim.AdamW([model.weight]), torch.optim.SGD([model.bias], momentum=0.9))
    model(torch.ones(2)).sum().backward()
    for one in both.optimizers:
        one.step()
    both.optimizers[0].state[model.weight]["exp_avg"][0, 0] = NAN
    assert first_non_finite_state(both) == "optimizer.a.state.0.exp_avg"
    assert first_non_finite_state(both, ["optimizer.a.*"]) is None
    guard = ckptguard.TrainingGuard(tmp_path / "run", model=model, optimizer=both, daemon=None)

    def saved() -> None:
        guard.save(step=1, blocking=blocking)
        guard.wait_for_save()

    with pytest.raises(SickTrainingError):
        saved()
    guard.close()
    assert not list((tmp_path / "run").glob("step-*"))
    settings = Settings(allow_nonfinite=("optimizer.a.state.0.exp_avg",))
    guard = ckptguard.TrainingGuard(tmp_path / "allowed", model=model, optimizer=both, daemon=None, settings=settings)
    saved()
    guard.close()
    assert list((tmp_path / "allowed").glob("step-*"))


def test_moments_deeper_in_a_state() -> None:
    """Shampoo and its kind keep lists of matrices."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["preconditioners"] = [torch.ones(2, 2), torch.tensor([[1.0, NAN]])]
    assert first_non_finite_state(optimizer) == "optimizer.state.0.preconditioners.1"
