"""accelerate's save_state, as the installed one writes it, damaged, and loaded by it."""

import pytest
from contract import FULL, Contract, Kind, way_back
from groups import BY_KIND

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.writers, pytest.mark.torch, pytest.mark.timeout(400)]

USUAL = {
    "layout": "accelerate",
    "series": "checkpoint-#",
    "path": "checkpoint-{}",
    "steps": {"2": 2, "4": 4, "6": 6},
    "roles": FULL,
    "needed": ("model.safetensors",),
    "main": "optimizer.bin",
}
KINDS = [
    Kind("accelerate/named", **USUAL | {"series": "step_#", "path": "step_{}"}),
    Kind(
        "accelerate/automatic",
        **USUAL
        | {
            "series": "checkpoints/checkpoint_#",
            "path": "checkpoints/checkpoint_{}",
            "steps": {"0": 0, "1": 1, "2": 2},
        },
    ),
    Kind(
        "accelerate/fsdp",
        **USUAL | {"needed": (".metadata", "*.distcp"), "main": "optimizer_0/__0_0.distcp"},
    ),
    Kind("accelerate/ddp", **USUAL),
    Kind(
        "accelerate/deepspeed",
        **USUAL
        | {
            "needed": ("*_states.pt",),
            "plain": ("*.py", "latest"),
            "main": "pytorch_model/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        },
    ),
]
STEP_OF_SAVE = {0: 2, 1: 4, 2: 6}  # the automatic names count saves


class TestContract(Contract):
    """Clean, aged, damaged."""


@pytest.mark.parametrize("kinds", [KINDS[:3], KINDS[3:4], KINDS[4:]], ids=["one-process", "ddp", "deepspeed"])
def test_accelerate_loads_known_good(kinds, copied, written, tmp_path):
    """The newest is damaged: load_state takes what is restored, bit for bit as it was saved."""
    arguments = []
    for kind in kinds:
        restored, step = way_back(kind, copied(kind.name), tmp_path / "back" / kind.name.partition("/")[2])
        arguments += [written(kind.name), restored, STEP_OF_SAVE.get(step, step) if "auto" in kind.name else step]
    BY_KIND[kinds[0].name].resume(*arguments)
