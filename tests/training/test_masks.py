"""What of infinities is a mask, and what is sickness."""

import pytest
import torch

from ckptguard.training.weights import first_non_finite, first_non_finite_state

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
    assert first_non_finite(layer) is None
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[layer.bias]["momentum_buffer"] = torch.tensor([0.0, -INF])
    assert first_non_finite_state(optimizer) == "optimizer.state.0.momentum_buffer"
