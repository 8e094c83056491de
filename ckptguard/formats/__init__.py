"""File formats: how one file stores tensors. A new format is one file here and one line in the table.

Nothing here imports torch or numpy, and nothing that a file names is ever imported or called.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from ckptguard.formats.recognition import (
    DISTCP_SUFFIX,
    by_end,
    by_name,
    is_own_state,
    is_pickle,
    is_pointer,
    is_safetensors,
    is_torch_legacy,
    is_torch_zip,
)
from ckptguard.formats.structure import Beside, Format, Leaf, Structure
from ckptguard.formats.suffixes import has_tensor_suffix, is_dcp_metadata, tensor_suffix
from ckptguard.storage.protocol import Reader

__all__ = ["FORMATS", "Format", "Leaf", "Structure", "format_of", "read_structure", "tensor_suffix"]

HEAD = 64

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar")

# The first row that matches reads the file.
FORMATS: tuple[Format, ...] = (
    Format(name="npz", matches=by_end(".npz"), module="numpy.npz", suffixes=(".npz",), holds="arrays"),
    Format(name="npy", matches=by_end(".npy"), module="numpy.npy", suffixes=(".npy",), holds="arrays"),
    Format(name="dcp_metadata", matches=lambda path, head: is_dcp_metadata(path), module="dcp.metadata"),
    Format(
        name="distcp",
        matches=by_end(DISTCP_SUFFIX),
        module="dcp.distcp",
        explained_beside=True,
        suffixes=(DISTCP_SUFFIX,),
        holds="pieces",
    ),
    Format(name="safetensors", matches=is_safetensors, module="safetensors", suffixes=(".safetensors",)),
    Format(name="torch_zip", matches=is_torch_zip, module="torch.zip_file", suffixes=TORCH_SUFFIXES),
    Format(name="torch_legacy", matches=is_torch_legacy, module="torch.legacy_file"),
    Format(name="pickle", matches=is_pickle, module="torch.bare_pickle", suffixes=(".pkl", ".pickle"), holds="objects"),
    Format(name="hf_index", matches=by_end(".index.json"), module="json_files", read="read_index"),
    Format(name="trainer_state", matches=by_name("trainer_state.json"), module="json_files", read="read_trainer_state"),
    Format(name="ckptguard_state", matches=is_own_state, module="json_files", read="read_own_state"),
    Format(name="config_json", matches=by_end("config.json", "model_index.json"), module="json_files"),
    Format(name="pointer", matches=is_pointer, module="pointer_file"),
    Format(name="yaml", matches=by_end(".yaml", ".yml"), module="yaml_numbers"),
    # The name promises tensors, but the bytes fit nothing.
    Format(name="unrecognised", matches=lambda path, head: has_tensor_suffix(path), module="opaque"),
    Format(name="opaque", matches=lambda path, head: True, module="opaque"),
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
    read = getattr(importlib.import_module(f"ckptguard.formats.{row.module}"), row.read)
    with _collection_paused():
        found: Structure = read(reader, path, beside) if row.explained_beside else read(reader, path)
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
