"""Raw DeepSpeed on two ranks, ZeRO 1 to 3: damaged, and loaded by an engine."""

import pytest
from contract import Contract, Kind, way_back
from groups import BY_KIND

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.writers, pytest.mark.torch, pytest.mark.timeout(400)]

USUAL = {
    "layout": "deepspeed",
    "series": "global_step#",
    "path": "global_step{}",
    "steps": {"2": 2, "4": 4, "6": 6},
    "roles": ("model", "optimizer", "scheduler"),
}
KINDS = [
    Kind("deepspeed/zero1", main="zero_pp_rank_1_mp_rank_00_optim_states.pt", **USUAL),
    Kind("deepspeed/zero2", main="mp_rank_00_model_states.pt", **USUAL),
    Kind("deepspeed/zero3", main="zero_pp_rank_1_mp_rank_00_model_states.pt", **USUAL),
]


class TestContract(Contract):
    """Clean, aged, damaged."""


def test_an_engine_loads_known_good(copied, written, tmp_path):
    """The newest is damaged: both ranks load what is restored, bit for bit as it was saved."""
    arguments = []
    for kind in KINDS:
        restored, step = way_back(kind, copied(kind.name), tmp_path / "back" / kind.name.partition("/")[2])
        arguments += [written(kind.name), restored.parent, step]
    BY_KIND[KINDS[0].name].resume(*arguments)
