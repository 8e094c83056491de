"""What reading a pickle of many small arrays keeps in memory grows with their number, by a bounded amount for each."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptguard.scan import ScanOptions, scan_files
from ckptguard.storage import open_storage

MOST = (50 << 20) / 40_000  # bytes for one array of a replay buffer


def arrays(count: int) -> list[Any]:
    """So many arrays, each of its own."""
    return [np.full(1000, number, np.float32) for number in range(count)]


BUFFERS: dict[str, Callable[[int], Any]] = {
    "a list": arrays,
    "a dict": lambda count: {f"key{number}": array for number, array in enumerate(arrays(count))},
}


def peak(folder: Path, state: Any, protocol: int) -> int:
    """The most bytes that Python holds while a file of this state is scanned."""
    torch.save(state, folder / "buffer.pt", pickle_protocol=protocol)
    storage = open_storage(str(folder))
    tracemalloc.start()
    try:
        scan_files(storage, ["buffer.pt"], ScanOptions(md5=False))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.torch
@pytest.mark.parametrize(("buffer", "protocol"), [("a dict", 2), ("a list", 4)])
def test_many_small_arrays_need_little_memory(buffer: str, protocol: int, tmp_path: Path) -> None:
    """The difference of two sizes: what any large file needs is in both."""
    make, few, many = BUFFERS[buffer], 2500, 5000
    peak(tmp_path, make(1), protocol)  # imports
    more = peak(tmp_path, make(many), protocol) - peak(tmp_path, make(few), protocol)
    assert more / (many - few) <= MOST
