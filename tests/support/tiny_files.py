"""The files of a tiny checkpoint, written by hand: for many saves at once, in processes without torch."""

from __future__ import annotations

import json
import random
import struct

WEIGHTS, CONFIG = "model.safetensors", "config.json"
Content = dict[str, bytes]  # by the name in the checkpoint's folder


def content(seed: int) -> Content:
    """The files of a checkpoint: of one size, and different in each of its three tensors for every seed."""
    numbers = random.Random(seed)
    header: dict[str, object] = {}
    for index, name in enumerate(("a", "b", "c")):
        header[name] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * index, 24 * index + 24]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return {
        WEIGHTS: struct.pack("<Q", len(text)) + text + struct.pack("<18f", *(numbers.uniform(1, 2) for _ in range(18))),
        CONFIG: json.dumps({"hidden_size": 4, "seed": f"{seed:06d}"}).encode(),
    }
