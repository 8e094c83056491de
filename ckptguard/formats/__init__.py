"""File formats: how one file stores tensors. A new format is one file here and one line in the table.

Nothing here imports torch or numpy, and nothing that a file names is ever imported or called.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from ckptguard.formats import recognition
from ckptguard.formats.structure import Beside, Format, Leaf, Problem, SpanPlace, Structure, TensorPlace
from ckptguard.formats.suffixes import tensor_suffix
from ckptguard.storage.protocol import Reader

__all__ = [
    "FORMATS",
    "Beside",
    "Format",
    "Leaf",
    "Problem",
    "SpanPlace",
    "Structure",
    "TensorPlace",
    "format_of",
    "read_structure",
    "tensor_suffix",
]

HEAD = 64

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar")

# The first row that matches reads the file.
FORMATS: tuple[Format, ...] = (
    Format(name="npz", matches=recognition.is_npz, module="numpy.npz", suffixes=(".npz",), holds="arrays"),
    Format(name="npy", matches=recognition.is_npy, module="numpy.npy", suffixes=(".npy",), holds="arrays"),
    Format(name="dcp_metadata", matches=recognition.is_metadata, module="dcp.metadata"),
    Format(
        name="distcp",
        matches=recognition.is_distcp,
        module="dcp.distcp",
        explained_beside=True,
        suffixes=(".distcp",),
        holds="pieces",
    ),
    Format(name="safetensors", matches=recognition.is_safetensors, module="safetensors", suffixes=(".safetensors",)),
    Format(name="torch_zip", matches=recognition.is_torch_zip, module="torch.zip_file", suffixes=TORCH_SUFFIXES),
    Format(name="torch_legacy", matches=recognition.is_torch_legacy, module="torch.legacy_file"),
    Format(
        name="pickle",
        matches=recognition.is_pickle,
        module="torch.bare_pickle",
        suffixes=(".pkl", ".pickle"),
        holds="objects",
    ),
    Format(name="hf_index", matches=recognition.is_index, module="hf_index"),
    Format(name="trainer_state", matches=recognition.is_trainer_state, module="trainer_state"),
    Format(name="ckptguard_state", matches=recognition.is_own_state, module="own_state"),
    Format(name="config_json", matches=recognition.is_config, module="json_files"),
    Format(name="pointer", matches=recognition.is_pointer, module="pointer_file"),
    Format(name="yaml", matches=recognition.is_yaml, module="yaml_numbers"),
    Format(name="unrecognised", matches=recognition.is_unrecognised, module="opaque"),
    Format(name="opaque", matches=recognition.is_anything, module="opaque"),
)


def format_of(path: str, head: bytes) -> Format:
    """The row for a file of this name and these first bytes; "opaque" for anything that nobody claims."""
    return next(row for row in FORMATS if row.matches(path, head))


def read_structure(reader: Reader, path: str, beside: Beside = lambda name: None) -> Structure:
    """The structure of one file, whatever its bytes; raises only what the readers raise.

    `beside(name)` gives the structure of the file of that name in the same folder, None where there is none.
    """
    head = reader.read(0, min(reader.entry.size, HEAD))
    row = format_of(path, head)
    # Most commands meet one or two formats: the readers of the others are not loaded.
    module = importlib.import_module(f"ckptguard.formats.{row.module}")
    with _collection_paused():
        found: Structure
        found = module.read_beside(reader, path, beside) if row.explained_beside else module.read(reader, path)
    return found


@contextmanager
def _collection_paused() -> Iterator[None]:
    """No automatic collection inside. What readers build has no cycles to find, but looking for them again and again
    takes as long as the reading itself. A collector that was off stays off."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
