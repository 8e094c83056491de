"""Lightning's checkpoints, files and folders: damaged, and continued by its Trainer."""

import pytest
from contract import Contract, Kind, way_back
from groups import BY_KIND

pytest.importorskip("lightning")
pytestmark = [pytest.mark.writers, pytest.mark.torch, pytest.mark.timeout(400)]

USUAL = {
    "layout": "lightning",
    "series": "epoch=#-step=#.ckpt",
    "path": "epoch=0-step={}.ckpt",
    "steps": {"2": 2, "4": 4, "6": 6},
    "roles": ("model", "optimizer", "scheduler"),
    "others": ("last.ckpt",),
}
KINDS = [
    Kind("lightning/files", **USUAL),
    Kind("lightning/finite", **USUAL),
    Kind("lightning/sharded", **USUAL | {"others": (), "main": "__0_0.distcp"}),
]


class TestContract(Contract):
    """Clean, aged, damaged. Clean: best_score is inf, a mask of -inf, batch norm, lr 0 in warm-up, last.ckpt."""


def test_lightning_resumes_from_known_good(copied, written, tmp_path):
    """The newest is damaged: Trainer.fit(ckpt_path) takes what is restored, bit for bit as it was saved."""
    arguments = []
    for kind in KINDS:
        restored, _ = way_back(kind, copied(kind.name), tmp_path / "back" / kind.name.partition("/")[2])
        arguments += [written(kind.name), restored]
    BY_KIND["lightning/files"].resume(*arguments)
