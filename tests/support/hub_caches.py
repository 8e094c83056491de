"""Hugging Face hub caches, built by hand as `huggingface_hub` leaves them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from safetensors.torch import save

from support.runs import state_dict

COMMIT = "2439f60ef33a0d46d85da5001d52aeda5b00ce9f"
LATER = "70d9c1fb3d27b24b6d0a8a4ac6e4ad1f1b0f8a11"
_OLD = 1_700_000_000


def git_sha1(data: bytes) -> str:
    """The name that git gives a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sharded_files(seed: int = 1) -> dict[str, bytes]:
    """What a repository with three shards holds."""
    state = state_dict(seed)
    names = sorted(state)
    files, weight_map = {}, {}
    for number in range(3):
        shard = f"model-{number + 1:05d}-of-00003.safetensors"
        files[shard] = save({n: state[n] for n in names[number::3]})
        weight_map |= dict.fromkeys(names[number::3], shard)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    files["config.json"] = b'{"hidden_size": 48}'
    files["onnx/config.json"] = b'{"opset": 17}'
    return files


class Hub:
    """A hub folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def repository(self, name: str = "models--org--tiny") -> Path:
        """A repository's folder."""
        return self.folder / name

    def download(
        self,
        files: dict[str, bytes],
        *,
        repository: str = "models--org--tiny",
        commit: str = COMMIT,
        ref: str | None = "main",
        links: bool = True,
    ) -> Path:
        """Put files into the cache as a finished download does; the snapshot's folder."""
        root = self.repository(repository)
        snapshot = root / "snapshots" / commit
        for folder in (root / "blobs", root / "refs", snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        if ref is not None:
            (root / "refs" / ref).write_text(commit)
        for name, data in files.items():
            path = snapshot / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not links:
                _write(path, data)
                continue
            large = name.endswith((".safetensors", ".bin"))
            blob = root / "blobs" / (hashlib.sha256(data).hexdigest() if large else git_sha1(data))
            _write(blob, data)
            path.symlink_to(os.path.relpath(blob, path.parent))
        return snapshot

    def share(self, link: Path) -> Path:
        """Move a blob to where repositories share bytes, as huggingface_hub 2 does; the new place."""
        blob = link.resolve()
        store = self.folder / "blobs"
        xet = hashlib.sha256(b"xet" + blob.read_bytes()).hexdigest()
        (store / xet[:2]).mkdir(parents=True, exist_ok=True)
        (store / ".huggingface-shared-blobs").write_text("1\n")
        place = store / xet[:2] / xet
        blob.rename(place)
        blob.symlink_to(os.path.relpath(place, blob.parent))
        return place


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.utime(path, (_OLD, _OLD))
