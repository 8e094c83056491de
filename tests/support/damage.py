"""Kinds of damage, each as a function that harms a checkpoint on disk and says what it hit.

Every function takes the folder of a run, the path of a checkpoint in it, its sealed manifest and a seeded random
source, and returns the file that was harmed and the names of the tensors whose bytes were.
"""

from __future__ import annotations

import json
import os
import random
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from ckptguard.values.manifest import File, Manifest, Tensor

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
    files = [f for f in tensor_files(manifest) if f.path != manifest.path]
    if not files:
        return None  # without its own file there is no checkpoint any more: that is rotation, not damage
    file = rng.choice(files)
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
    "float64": [struct.pack("<Q", b << 48) for b in (0x7FF8, 0xFFF9, 0x7FF4, 0x7FF0, 0xFFF0)],
    "float8_e5m2": [bytes([b]) for b in (0x7F, 0xFE, 0x7D, 0x7C, 0xFC)],
    "float8_e4m3fn": [b"\x7f", b"\xff"],
    "float8_e4m3fnuz": [b"\x80"],
    "float8_e5m2fnuz": [b"\x80"],
}
_NON_FINITE |= {"complex32": _NON_FINITE["float16"], "complex64": _NON_FINITE["float32"]}
_NON_FINITE |= {"complex128": _NON_FINITE["float64"]}


def non_finite(dtype: str) -> Damage:
    """One element of one tensor of this dtype becomes NaN (quiet, signalling, negative) or infinite."""

    def harm(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
        places = [(f, t) for f in manifest.files for t in f.tensors if t.dtype == dtype and t.span is not None]
        if not places:
            return None
        file, tensor = rng.choice(places)
        return _put(run, file, tensor, rng.choice(_NON_FINITE[dtype]), rng)

    return harm


def _put(run: Path, file: File, tensor: Tensor, word: bytes, rng: random.Random) -> Hit | None:
    """One element (of a complex one, one component) becomes this."""
    span = file.spans[tensor.span]

    def put(data: bytearray) -> None:
        at = span.offset + rng.randrange(span.length // len(word)) * len(word)
        data[at : at + len(word)] = word

    return _rewrite(run, file, put)


def broken_header(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """The bytes that say what is where: a safetensors header, a zip's local header or central directory."""
    file = rng.choice(tensor_files(manifest))

    def harm(data: bytearray) -> None:
        if file.format not in ("safetensors", "torch_zip"):
            taken = [(s.offset, s.offset + s.length) for s in file.spans]
            outside = [n for n in range(len(data)) if not any(a <= n < b for a, b in taken)]
            at = rng.choice(outside)
        elif file.format == "safetensors":
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


def swapped_files(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """Two files with tensors of one suffix have changed places."""
    by_suffix: dict[str, list[File]] = {}
    for file in tensor_files(manifest):
        by_suffix.setdefault(Path(file.path).suffix, []).append(file)
    groups = [files for _, files in sorted(by_suffix.items()) if len(files) > 1]
    if not groups:
        return None
    first, second = rng.sample(rng.choice(groups), 2)
    before = {f.path: (run / f.path).read_bytes() for f in (first, second)}
    (run / first.path).write_bytes(before[second.path])
    (run / second.path).write_bytes(before[first.path])
    if before[first.path] == before[second.path]:
        return None
    return Hit(first.path, hit_spans(first, before[first.path], before[second.path]))


def sparse_hole(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """A range of the file reads as zeros, as a lost extent does; the length stays."""
    file = rng.choice(tensor_files(manifest))

    def punch(data: bytearray) -> None:
        start = rng.randrange(len(data))
        stop = rng.randrange(start, len(data)) + 1
        data[start:stop] = bytes(stop - start)

    return _rewrite(run, file, punch)


def span_flip(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """One bit of one tensor."""
    file = rng.choice(tensor_files(manifest))
    span = rng.choice(file.spans)

    def flip(data: bytearray) -> None:
        data[span.offset + rng.randrange(span.length)] ^= 1 << rng.randrange(8)

    return _rewrite(run, file, flip)


def envelope_flip(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """One bit outside all tensors, in any file: headers, pickles, configurations, metadata."""
    file = rng.choice([f for f in manifest.files if f.size > sum(s.length for s in f.spans)])
    taken = sorted((s.offset, s.offset + s.length) for s in file.spans)

    def flip(data: bytearray) -> None:
        at = rng.choice([n for n in range(len(data)) if not any(start <= n < stop for start, stop in taken)])
        data[at] ^= 1 << rng.randrange(8)

    return _rewrite(run, file, flip)


def optimizer_only(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
    """A NaN in optimizer state; every weight stays as it was."""
    places = [
        (f, t)
        for f in manifest.files
        for t in f.tensors
        if t.role == "optimizer" and t.dtype == "float32" and t.span is not None
    ]
    if not places:
        return None
    file, tensor = rng.choice(places)
    return _put(run, file, tensor, _NON_FINITE["float32"][0], rng)


Tree = dict[str, object] | list[object]


def _load(path: Path) -> dict[str, object]:
    if path.suffix == ".safetensors":
        return dict(safetensors.torch.load_file(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        return torch.load(path, weights_only=False)


def _save(state: object, file: File, path: Path) -> None:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
        path.chmod(0o644)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=file.format == "torch_zip")


def _float_tensors(tree: object, above: tuple[str, ...] = ()) -> list[tuple[dict[str, object], tuple[str, ...]]]:
    """(the dictionary that holds it, its path) of every float tensor with elements."""
    found = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        path = (*above, str(key))
        if isinstance(tree, dict) and torch.is_tensor(value) and value.is_floating_point() and value.numel() > 1:
            found.append((tree, (*above, key)))
        found += _float_tensors(value, path)
    return found


def changed_key(kind: str) -> Damage:
    """A file is written again, whole and loadable, with one key renamed, missing, extra, reshaped or re-typed."""

    def harm(run: Path, manifest: Manifest, rng: random.Random) -> Hit | None:
        files = [f for f in tensor_files(manifest) if f.format in ("safetensors", "torch_zip", "torch_legacy")]
        if not files:
            return None
        loaded = [(file, _load(run / file.path)) for file in files]
        file, state = rng.choice([(f, s) for f, s in loaded if _float_tensors(s)] or [(None, None)])
        if file is None:
            return None
        tensors = _float_tensors(state)
        holder, (*above, key) = rng.choice(tensors)
        hit = key
        tensor = holder[key]
        if kind == "renamed":
            items = [(f"{k}_x" if k == key else k, v) for k, v in holder.items()]
            holder.clear()
            holder.update(items)
        elif kind == "missing":
            del holder[key]
        elif kind == "extra":
            hit = "surplus"
            holder[hit] = torch.randn(3, 4, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
        elif kind == "reshaped":
            holder[key] = tensor.reshape(-1, 1, 1).contiguous()
        else:
            holder[key] = tensor.to(torch.float64 if tensor.dtype is not torch.float64 else torch.float32)
        (run / file.path).unlink()
        _save(state, file, run / file.path)
        name = ".".join((*above, str(hit)))
        roles = {t.name: t.role for t in file.tensors}
        siblings = {r for n, r in roles.items() if n.rpartition(".")[0] == ".".join(above)}
        return Hit(file.path, ((name,),) if siblings == {"model"} else ())

    return harm


KINDS: dict[str, Damage] = {
    "bit_flip": bit_flip,
    "span_flip": span_flip,
    "envelope_flip": envelope_flip,
    "zeroed_page": zeroed_page,
    "sparse_hole": sparse_hole,
    "truncation": truncation,
    "appended_bytes": appended_bytes,
    "missing_shard": missing_shard,
    "empty_shard": empty_shard,
    "stale_shard": stale_shard,
    "swapped_files": swapped_files,
    "optimizer_only": optimizer_only,
    "broken_header": broken_header,
    "broken_index": broken_index,
    **{f"non_finite_{dtype}": non_finite(dtype) for dtype in sorted(_NON_FINITE)},
    **{f"key_{kind}": changed_key(kind) for kind in ("renamed", "missing", "extra", "reshaped", "retyped")},
}


def applies(kind: str, manifest: Manifest) -> bool:
    """Whether a checkpoint has what this kind of damage needs."""
    files = tensor_files(manifest)
    suffixes = [Path(f.path).suffix for f in files]
    tensors = [t for f in files for t in f.tensors if t.span is not None]
    if kind == "broken_index":
        return any(f.path.endswith(".index.json") for f in manifest.files)
    if kind == "missing_shard":
        return any(f.path != manifest.path for f in files)
    if kind == "swapped_files":
        return len(set(suffixes)) < len(suffixes)
    if kind == "optimizer_only":
        return any(t.role == "optimizer" and t.dtype == "float32" for t in tensors)
    if kind.startswith("key_"):
        whole = [f for f in files if f.format in ("safetensors", "torch_zip", "torch_legacy")]
        return any(t.dtype.startswith(("float", "bfloat")) for f in whole for t in f.tensors if len(t.shape) > 1)
    return not kind.startswith("non_finite_") or any(f"non_finite_{t.dtype}" == kind for t in tensors)


_OLD, _FUTURE = 10**18, 4 * 10**18  # 2001 and 2096, in nanoseconds


def set_times(run: Path, manifest: Manifest, times: str) -> None:
    """Put the old modification times back, as bit rot would ("kept"), or make them absurd; "changed" leaves them."""
    for file in manifest.files if times != "changed" else ():
        if (run / file.path).exists():
            stamp = {"kept": file.mtime_ns, "old": _OLD, "future": _FUTURE}[times]
            os.utime(run / file.path, ns=(stamp, stamp))
