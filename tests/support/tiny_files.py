"""The files of a tiny checkpoint, written by hand: for many saves at once, in processes without torch."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Mapping, Sequence

WEIGHTS, CONFIG = "model.safetensors", "config.json"
Content = dict[str, bytes]  # by the name in the checkpoint's folder


def safetensors_head(shapes: Mapping[str, Sequence[int]], dtype: str = "F32") -> bytes:
    """How a safetensors file of these tensors begins: all but their bytes, which follow in the same order."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * {"F32": 4, "U8": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def content(seed: int) -> Content:
    """The files of a checkpoint: of one size, and different in each of its three tensors for every seed."""
    numbers = random.Random(seed)
    weights = struct.pack("<18f", *(numbers.uniform(1, 2) for _ in range(18)))
    return {
        WEIGHTS: safetensors_head(dict.fromkeys("abc", (2, 3))) + weights,
        CONFIG: json.dumps({"hidden_size": 4, "seed": f"{seed:06d}"}).encode(),
    }
