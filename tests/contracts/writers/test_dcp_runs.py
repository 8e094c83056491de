"""torch.distributed.checkpoint under FSDP2 on two ranks, .distcp and safetensors: damaged, and loaded on one rank."""

import pytest
from contract import Contract, Kind, way_back
from groups import BY_KIND
from launch import launch

pytest.importorskip("torch")
pytestmark = [pytest.mark.writers, pytest.mark.torch, pytest.mark.timeout(400)]

USUAL = {"layout": "dcp", "series": "step_#", "path": "step_{}", "steps": {"2": 2, "4": 4, "6": 6}}
KINDS = [
    Kind("dcp/step", roles=("model", "optimizer"), main="__1_0.distcp", **USUAL),
    Kind(
        "dcp/titan",
        roles=("model", "optimizer", "data"),
        main="__0_0.distcp",
        **USUAL | {"series": "checkpoint/step-#", "path": "checkpoint/step-{}"},
    ),
    Kind(
        "dcp/hf_shards",
        roles=("model",),
        needed=("shard-00001-*",),  # that the last piece of a row is not there, no other piece can tell
        main="shard-00002-model-00001-of-00002.safetensors",
        **USUAL | {"layout": "folder"},
    ),
    Kind(
        "dcp/hf",
        roles=("model",),
        main="model-00002-of-00002.safetensors",
        needed=("model*",),
        **USUAL | {"layout": "folder"},
    ),
]


class TestContract(Contract):
    """Clean, aged, damaged."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_number_of_ranks_loads_known_good(ranks, copied, written, tmp_path):
    """The newest is damaged: dcp.load takes what is restored, bit for bit as it was saved."""
    arguments = []
    for kind in KINDS:
        restored, step = way_back(kind, copied(kind.name), tmp_path / "back" / kind.name.partition("/")[2])
        arguments += [written(kind.name), restored, step]
    launch(f"write_{BY_KIND[KINDS[0].name].system}.py", "resume", *arguments, ranks=ranks)
