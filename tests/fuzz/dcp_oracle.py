"""torch's own reading of ``.metadata``, with nothing to call but the plain classes that it is made of."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from fuzz.disarmed import Inert
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptguard.formats.structure import Structure

_CLASSES = {
    "Metadata": metadata.Metadata,
    "TensorStorageMetadata": metadata.TensorStorageMetadata,
    "BytesStorageMetadata": metadata.BytesStorageMetadata,
    "ChunkStorageMetadata": metadata.ChunkStorageMetadata,
    "MetadataIndex": metadata.MetadataIndex,
    "_StorageInfo": _StorageInfo,
    "Size": torch.Size,
}

Contents = tuple[dict[str, tuple[int, ...]], list[tuple[str, int, int]]]


class _Whitelisted(pickle.Unpickler):
    def find_class(self, module, name):
        if module.startswith("torch") and name in _CLASSES:
            return _CLASSES[name]
        return Inert


def torch_metadata(data: bytes) -> Contents | None:
    """Shapes by name, and (file, offset, length) of every stored range; None for what torch could not use."""
    try:
        loaded: Any = _Whitelisted(io.BytesIO(data)).load()
        tensors = {
            name: tuple(entry.size)
            for name, entry in loaded.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }
        places = [(info.relative_path, info.offset, info.length) for info in loaded.storage_data.values()]
    except Exception:
        return None
    plain = all(type(name) is str and all(type(n) is int for n in shape) for name, shape in tensors.items())
    return (tensors, sorted(places)) if plain else None


def dcp_contents(structure: Structure) -> Contents:
    """The same from our structure."""
    tensors = {tensor.name: tensor.shape for tensor in structure.tensors}
    places = [(path, c.offset, c.length) for path, chunks in structure.chunks.items() for c in chunks]
    return tensors, sorted(places)
