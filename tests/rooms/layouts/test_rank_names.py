"""How many ranks wrote a checkpoint, by the names of its files."""

from __future__ import annotations

import pytest

from ckptguard.layouts.rank_names import ranks_named


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["c/__0_0.distcp", "c/__0_1.distcp", "c/__1_0.distcp", "c/.metadata"], 2),
        (["c/model.safetensors", "c/rng_state_0.pth", "c/rng_state_1.pth", "c/rng_state_2.pth"], 3),
        (["c/random_states_0.pkl"], 1),
        ([f"c/bf16_zero_pp_rank_{d}_mp_rank_0{m}_optim_states.pt" for d in range(4) for m in range(2)], 8),
        (["c/__999999_0.distcp"], 1),  # a name alone does not make a million GPUs
        (["c/model.safetensors", "c/rng_state.pth"], None),
        ([], None),
    ],
)
def test_files_of_ranks_tell_how_many_gpus_there_are(names: list[str], ranks: int | None) -> None:
    """Those that each rank writes for itself, whatever else is there."""
    assert ranks_named(names) == ranks
