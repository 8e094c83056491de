"""Kinds of damage, each as a function that harms a checkpoint on disk and says what it hit.

Every function takes the folder of a run, the path of a checkpoint in it, its sealed manifest and a seeded random
source, and returns the file that was harmed and the names of the tensors whose bytes were.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from ckptguard.manifest import File, Manifest

PAGE = 4096


@dataclass(frozen=True)
class Hit:
    """What was harmed: a file (relative to the run), and tensors whose bytes changed (any of a group will do)."""

    file: str
    tensors: tuple[tuple[str, ...], ...] = ()


Damage = Callable[[Path, Manifest, random.Random], Hit | None]


def tensor_files(manifest: Manifest) -> list[File]:
    """Files that hold tensors."""
    return [f for f in manifest.files if f.spans]


def hit_spans(file: File, before: bytes, after: bytes) -> tuple[tuple[str, ...], ...]:
    """Names of the tensors of every span whose bytes differ."""
    groups = []
    for number, span in enumerate(file.spans):
        end = span.offset + span.length
        if before[span.offset : end] != after[span.offset : end]:
            groups.append(tuple(t.name for t in file.tensors if t.span == number))
    return tuple(groups)


def _rewrite(run: Path, file: File, change: Callable[[bytearray], None]) -> Hit | None:
    path = run / file.path
    before = path.read_bytes()
    changed = bytearray(before)
    change(changed)
    if bytes(changed) == before:
        return None
    path.write_bytes(changed)
    return Hit(file.path, hit_spans(file, before, bytes(changed)))


def bit_flip(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """One bit, anywhere in any file of the checkpoint."""
    file = rng.choice([f for f in manifest.files if f.size])

    def flip(data: bytearray) -> None:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    return _rewrite(run, file, flip)


def zeroed_page(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """One aligned page of zeros."""
    file = rng.choice(tensor_files(manifest))

    def zero(data: bytearray) -> None:
        start = rng.randrange((len(data) + PAGE - 1) // PAGE) * PAGE
        data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))

    return _rewrite(run, file, zero)


def truncation(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """The end of a file is gone."""
    file = rng.choice(tensor_files(manifest))

    def cut(data: bytearray) -> None:
        del data[rng.randrange(len(data)) :]

    return _rewrite(run, file, cut)


def appended_bytes(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """Bytes behind the end."""
    file = rng.choice(tensor_files(manifest))
    return _rewrite(run, file, lambda data: data.extend(rng.randbytes(rng.randrange(1, 5000))))


def missing_shard(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """A file with tensors is gone, while others are there."""
    file = rng.choice(tensor_files(manifest))
    if len(manifest.files) == 1:
        return None  # all files gone is rotation, not damage
    (run / file.path).unlink()
    return Hit(file.path)


def empty_shard(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """A file with tensors has no bytes."""
    file = rng.choice(tensor_files(manifest))
    (run / file.path).write_bytes(b"")
    return Hit(file.path)


def stale_shard(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """A file with tensors holds what the step before held."""
    file = rng.choice(tensor_files(manifest))
    old = run / file.path.replace("200", "100")
    before, after = (run / file.path).read_bytes(), old.read_bytes()
    (run / file.path).write_bytes(after)
    return Hit(file.path, hit_spans(file, before, after))


_NON_FINITE = {
    "float32": [struct.pack("<I", b) for b in (0x7FC00000, 0xFFC00001, 0x7F800001, 0x7F800000, 0xFF800000)],
    "float16": [struct.pack("<H", b) for b in (0x7E00, 0xFE01, 0x7C01, 0x7C00, 0xFC00)],
    "bfloat16": [struct.pack("<H", b) for b in (0x7FC0, 0xFFC1, 0x7F81, 0x7F80, 0xFF80)],
}


def non_finite(dtype: str) -> Damage:
    """One element of one tensor of this dtype becomes NaN (quiet, signalling, negative) or infinite."""

    def harm(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
        places = [(f, t) for f in manifest.files for t in f.tensors if t.dtype == dtype and t.span is not None]
        file, tensor = rng.choice(places)
        span = file.spans[tensor.span]
        word = rng.choice(_NON_FINITE[dtype])

        def put(data: bytearray) -> None:
            at = span.offset + rng.randrange(span.length // len(word)) * len(word)
            data[at : at + len(word)] = word

        return _rewrite(run, file, put)

    return harm


def broken_header(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """The bytes that say what is where: a safetensors header, a zip's local header or central directory."""
    file = rng.choice(tensor_files(manifest))

    def harm(data: bytearray) -> None:
        if file.format == "safetensors":
            length = struct.unpack("<Q", data[:8])[0]
            at = rng.randrange(8 + length)
        else:
            directory = data.rindex(b"PK\x01\x02", 0, len(data))
            first = data.index(b"PK\x01\x02")
            at = rng.randrange(first, max(directory + 46, first + 1))
        data[at] ^= rng.randrange(1, 256)

    return _rewrite(run, file, harm)


def broken_index(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """The index of a sharded checkpoint, cut or changed."""
    indexes = [f for f in manifest.files if f.path.endswith(".index.json")]
    if not indexes:
        return None
    file = indexes[0]

    def harm(data: bytearray) -> None:
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            index = json.loads(data)
            name = rng.choice(sorted(index["weight_map"]))
            del index["weight_map"][name]
            data[:] = json.dumps(index).encode()

    return _rewrite(run, file, harm)


def _load(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return torch.load(path, weights_only=True)


def _save(state: dict[str, torch.Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
        path.chmod(0o644)
    else:
        torch.save(state, path)


def changed_key(kind: str) -> Damage:
    """A file is written again, whole and loadable, with one key renamed, missing, extra, reshaped or re-typed."""

    def harm(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
        file = rng.choice(tensor_files(manifest))
        state = _load(run / file.path)
        name = rng.choice(sorted(n for n, t in state.items() if t.is_floating_point() and t.ndim == 2))
        hit = name
        if kind == "renamed":
            state = {(k + "_x" if k == name else k): v for k, v in state.items()}
        elif kind == "missing":
            del state[name]
        elif kind == "extra":
            hit = "surplus.weight"
            state[hit] = torch.randn(3, 4, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
        elif kind == "reshaped":
            state[name] = state[name].reshape(-1, 1).contiguous()
        else:
            state[name] = state[name].to(torch.float64)
        (run / file.path).unlink()
        _save(state, run / file.path)
        return Hit(file.path, ((hit,),))

    return harm


KINDS: dict[str, Damage] = {
    "bit_flip": bit_flip,
    "zeroed_page": zeroed_page,
    "truncation": truncation,
    "appended_bytes": appended_bytes,
    "missing_shard": missing_shard,
    "empty_shard": empty_shard,
    "stale_shard": stale_shard,
    "non_finite_f32": non_finite("float32"),
    "non_finite_f16": non_finite("float16"),
    "non_finite_bf16": non_finite("bfloat16"),
    "broken_header": broken_header,
    "broken_index": broken_index,
    "key_renamed": changed_key("renamed"),
    "key_missing": changed_key("missing"),
    "key_extra": changed_key("extra"),
    "key_reshaped": changed_key("reshaped"),
    "key_retyped": changed_key("retyped"),
}


def keep_times(run: Path, manifest: Manifest, times: dict[str, tuple[int, int]]) -> None:
    """Put the old modification times back, as bit rot would."""
    for file in manifest.files:
        if (run / file.path).exists():
            os.utime(run / file.path, ns=times[file.path])
