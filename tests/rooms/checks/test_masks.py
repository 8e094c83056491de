"""What of infinities is a mask, and what is sickness."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptguard
from ckptguard.checks.evidence import ScannedTensor
from ckptguard.checks.finite import is_mask
from ckptguard.errors import SickTrainingError
from ckptguard.scan.result import Numbers
from ckptguard.training.signals.weights import first_of, model_tensors, state_tensors
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
    model.register_buffer("mask", torch.tensor(values).to(dtype))
    assert first_of(model_tensors(model)) == ("mask" if sick else None)


def test_what_is_learnt_is_no_mask():
    """A bias of zeros of which one became -Inf looks like a mask; so do moments."""
    layer = torch.nn.Linear(2, 4)
    torch.nn.init.zeros_(layer.bias)
    layer.bias.data[2] = -INF
    assert first_of(model_tensors(layer)) == "bias"
    layer.bias.requires_grad_(False)
    assert first_of(model_tensors(layer)) == "bias"  # as whoever reads the file later would say, who sees names only
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[layer.bias]["momentum_buffer"] = torch.tensor([0.0, -INF])
    assert first_of(state_tensors(optimizer)) == "optimizer.state.0.momentum_buffer"


def triangle(rows: int, *more: int) -> torch.Tensor:
    """A causal mask."""
    return torch.full((*more, rows, rows), -INF).triu(1)


BESIDE_ZERO = torch.tensor([0.0, -INF])
REAL_MASKS = {
    "attn_mask": triangle(77),  # CLIP's text tower
    "decoder.mask": triangle(448),  # Whisper's
    "h.0.attn.bias": triangle(16, 1, 1),  # a causal buffer under the name of old GPT-2's
    "h.0.causal": triangle(4),
    "layers.0.self_attn.tril": triangle(8).T.contiguous(),
    "future": triangle(9),  # by its form alone
    "_future_mask": triangle(2),
    "masks.0": BESIDE_ZERO,
    "attnMask": BESIDE_ZERO,
    "padding_mask": BESIDE_ZERO,
    "vocab_mask_buffer": BESIDE_ZERO,
    "attn_bias": BESIDE_ZERO.expand(2, 3, 2),
    "final_logits_bias": BESIDE_ZERO.reshape(1, 2),
}


@pytest.mark.parametrize("name", REAL_MASKS)
def test_masks_of_real_models(name: str) -> None:
    """Under the names that models give them, or as exact triangles."""
    assert judged(name, REAL_MASKS[name]) == (True, True)


LAST = (
    *("weight", "bias", "kernel", "running_mean", "running_var", "gamma", "scale", "lora_A", "lora_B", "sink"),
    *("pos_embed", "position_embedding", "mask_token", "masked_spec_embed", "mask_emb", "relative_position_bias_table"),
    *("attn_bias", "in_proj_bias", "exp_avg", "momentum_buffer", "moment1", "amax_history", "logit_scale", "x"),
)


@given(
    last=st.sampled_from(LAST),
    inside=st.sampled_from(["", "module.h.0.attn.", "mask.", "ema.decoder.mask_head."]),
    index=st.sampled_from(["", ".0", ".17"]),
    finite=st.sampled_from([0.0, 1.0, -3.5]),
    infinite=st.lists(st.booleans(), min_size=2, max_size=24).filter(lambda bits: any(bits) and not all(bits)),
    rows=st.sampled_from([1, 2, 3]),
)
def test_nothing_learnt_or_counted_is_a_mask(
    last: str, inside: str, index: str, finite: float, infinite: list[bool], rows: int
) -> None:
    """-Inf beside one finite value, in a vector or a matrix: a form that is no triangle excuses nothing."""
    values = torch.where(torch.tensor(infinite), -INF, finite)
    if rows > 1 and last != "attn_bias":
        values = values.expand(rows, -1)
    assert judged(f"{inside}{last}{index}", values) == (False, False)


@pytest.mark.parametrize("last", sorted({*LAST} - {"bias", "attn_bias", "in_proj_bias", "sink", "x"}))
def test_not_even_a_triangle_excuses_a_weight(last: str) -> None:
    """Its name says that it is learnt."""
    assert judged(f"h.{last}", triangle(8)) == (False, False)


def judged(name: str, values: torch.Tensor) -> tuple[bool, bool]:
    """Whether the check takes a tensor for a mask, and whether the guard does."""
    model = torch.nn.Module()
    place = model
    *inside, last = name.split(".")
    for part in inside:
        place.add_module(part, torch.nn.Module())
        place = place.get_submodule(part)
    place.register_buffer(last, values)
    bad = values.flatten().isinf()
    count, first = int(bad.sum()), int(bad.nonzero()[0])
    numbers = Numbers(count=bad.numel(), neginf=count, first_bad=first, single_finite=True)
    tensor = ScannedTensor("m.pt", name, "float32", tuple(values.shape), "model", 0, numbers)
    return is_mask(tensor, numbers), first_of(model_tensors(model)) is None


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
    assert first_of(state_tensors(both)) == "optimizer.a.state.0.exp_avg"
    assert first_of(state_tensors(both), ["optimizer.a.*"]) is None
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
    assert first_of(state_tensors(optimizer)) == "optimizer.state.0.preconditioners.1"
