"""One switch turns off what reads a distributed checkpoint by heart, and nothing that is found depends on it."""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptguard.formats.dcp import metadata_pickle, switch
from ckptguard.formats.torch import files
from ckptguard.scan import Scan, ScanOptions, scan_files
from ckptguard.storage import open_storage


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of many tensors in a few shapes, as DCP writes it."""
    shapes = [(4,), (8, 4), (300, 2), (6, 2, 2)]
    state = {f"layers.{n}.w": torch.full(shapes[n % 4], float(n)) for n in range(200)}
    state["odd"], state["half"] = torch.tensor([1.0, math.nan]), torch.ones(3, dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process only
        dcp.save({"model": state, "step": 7}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def everything(folder: Path) -> object:
    """All that a scan finds, but for how long it took."""
    keys = sorted(path.name for path in folder.iterdir())
    scan: Scan = scan_files(open_storage(folder), keys, ScanOptions(workers=1))
    return scan.files


def test_the_same_is_found_with_the_switch_on_and_off(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures, digests and numbers, of a whole checkpoint and of damaged ones; and the switch saves reading."""
    in_full: list[int] = []
    archive, alone = files.read_zip_within, metadata_pickle._FoldingMachine.repeat
    by_heart: list[bool] = []
    monkeypatch.setattr(files, "read_zip_within", lambda *given: in_full.append(1) or archive(*given))
    monkeypatch.setattr(
        metadata_pickle._FoldingMachine, "repeat", lambda *given: by_heart.append(True) or alone(*given)
    )
    with_it = everything(saved)
    quick = len(in_full)
    assert quick < 50
    assert len(by_heart) > 100
    by_heart.clear()
    monkeypatch.setattr(switch, "BY_HEART", False)
    assert everything(saved) == with_it
    assert len(in_full) - quick > 200
    assert not by_heart
    chosen = random.Random(5)
    for path in sorted(saved.iterdir()):
        whole = path.read_bytes()
        for _ in range(12):
            place = chosen.randrange(len(whole))
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
            monkeypatch.setattr(switch, "BY_HEART", True)
            found = everything(saved)
            monkeypatch.setattr(switch, "BY_HEART", False)
            assert everything(saved) == found, (path.name, place)
        path.write_bytes(whole)
