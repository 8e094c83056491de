"""Whether compressing replicas would pay: how much smaller the state of a real training gets, and at what speed.

    python -m benchmarks.bench_compress [--steps 150] [--width 192] [--layers 3] [--folder DIR]

Trains a small GPT on the source text of Python's standard library with AdamW, and compresses what a checkpoint of it
holds: weights in fp32 and bf16, and both moments. Each with zstd at levels 1 and 3 and with LZ4, as it is and with its
bytes shuffled: the first byte of all numbers, then the second, and so on. One thread does it. It is compared with a
copy to a file that is synced. It pays if more than 15 % go, no slower than the copy.
"""

from __future__ import annotations

import math
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import torch
from torch import nn

from benchmarks.measuring import options

CONTEXT, BATCH, BLOCK = 128, 8, 4 << 20
PAYS = 0.15


class Gpt(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The logits of each next byte."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        found = self.body(self.tokens(text) + self.places.weight[: text.shape[1]], mask=mask, is_causal=True)
        return self.head(found)  # type: ignore[no-any-return]


def train(width: int, layers: int, steps: int) -> dict[str, bytes]:
    """Train, and return the bytes of each kind of state."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in library)), dtype=torch.uint8).long()
    model = Gpt(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    loss = torch.tensor(0.0)
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 50)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    count = sum(one.numel() for one in model.parameters())
    print(f"{count:,} parameters, {steps} steps, loss {loss.item():.2f}")
    state = [optimizer.state[one] for one in model.parameters()]
    return {
        "weights, fp32": _bytes_of(list(model.parameters())),
        "weights, bf16": _bytes_of([one.bfloat16() for one in model.parameters()]),
        "first moment": _bytes_of([one["exp_avg"] for one in state]),
        "second moment": _bytes_of([one["exp_avg_sq"] for one in state]),
    }


def _bytes_of(tensors: list[torch.Tensor] | list[nn.Parameter]) -> bytes:
    return b"".join(one.detach().contiguous().view(torch.uint8).numpy().tobytes() for one in tensors)


def shuffled(data: bytes, width: int) -> bytes:
    """The bytes of numbers of one width by their place in them."""
    whole = len(data) - len(data) % width
    numbers = torch.frombuffer(bytearray(data[:whole]), dtype=torch.uint8).view(-1, width)
    return numbers.T.contiguous().numpy().tobytes() + data[whole:]


def ways(width: int) -> Iterator[tuple[str, Callable[[bytes], int]]]:
    """Each way to compress a block: its name, and a function that returns the bytes that are left."""
    for name, level in (("zstd", 1), ("zstd", 3), ("lz4", None)):
        codec = pyarrow.Codec(name, compression_level=level)
        called = f"{name} -{level}" if level is not None else name

        def alone(block: bytes, codec: pyarrow.Codec = codec) -> int:
            return int(codec.compress(block).size)

        def after(block: bytes, codec: pyarrow.Codec = codec) -> int:
            return int(codec.compress(shuffled(block, width)).size)

        yield called, alone
        yield f"shuffled, {called}", after


def copy_speed(data: bytes, folder: Path | None) -> float:
    """Bytes a second of a copy in blocks to a file that is synced; the best of three."""
    best = 0.0
    for _ in range(3):
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            for at in range(0, len(data), BLOCK):
                file.write(data[at : at + BLOCK])
            file.flush()
            os.fsync(file.fileno())
            best = max(best, len(data) / (time.perf_counter() - began))
    return best


def main() -> None:
    """Measure and print."""
    given = options(__doc__, steps=150, width=192, layers=3, folder=Path)
    found = train(given.width, given.layers, given.steps)
    copied = copy_speed(b"".join(found.values()), given.folder)
    print(f"a copy: {copied / 1e6:,.0f} MB/s\n")
    print("| state | way | saved | speed | pays |")
    print("|---|---|---|---|---|")
    of_all: dict[str, list[tuple[int, int, float]]] = {}
    for state, data in found.items():
        for way, compress in ways(2 if "bf16" in state else 4):
            left, seconds = measured(data, compress)
            of_all.setdefault(way, []).append((len(data), left, seconds))
            print_row(state, way, copied, [of_all[way][-1]])
    for way, parts in of_all.items():
        print_row("all four, a whole save", way, copied, parts)


def measured(data: bytes, compress: Callable[[bytes], int]) -> tuple[int, float]:
    """The bytes that are left, and the seconds that it takes; the best of three."""
    left, seconds = 0, math.inf
    for _ in range(3):
        began = time.perf_counter()
        left = sum(compress(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
        seconds = min(seconds, time.perf_counter() - began)
    return left, seconds


def print_row(state: str, way: str, copied: float, parts: list[tuple[int, int, float]]) -> None:
    """Print what a way saves of some state."""
    size, left, seconds = (sum(column) for column in zip(*parts, strict=True))
    saved, speed = 1 - left / size, size / seconds
    pays = "yes" if saved > PAYS and speed >= copied else "no"
    print(f"| {state} | {way} | {saved:.0%} | {speed / copied:.1f} x the copy | {pays} |")


if __name__ == "__main__":
    main()
