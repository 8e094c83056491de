"""File formats: how one file stores tensors. A new format is one file here and one line in the table.

Nothing here imports torch or numpy. Nothing that a file names is ever imported or called.
"""

from __future__ import annotations

import gc
import importlib

from ckptguard.formats import suffixes as names
from ckptguard.formats.structure import Beside, Format, Leaf, Structure
from ckptguard.formats.suffixes import tensor_suffix
from ckptguard.storage.protocol import Reader

__all__ = ["FORMATS", "UNSUMMED", "Format", "Leaf", "Structure", "format_of", "read_structure", "tensor_suffix"]

HEAD = 64
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar")

# The first row that matches reads the file.
FORMATS: tuple[Format, ...] = (
    Format("npz", names.by_end(".npz"), "numpy.arrays", "read_npz", suffixes=(".npz",), holds="arrays"),
    Format("npy", names.by_end(".npy"), "numpy.arrays", "read_npy", unsummed=True, suffixes=(".npy",), holds="arrays"),
    Format("dcp_metadata", lambda path, head: names.is_dcp_metadata(path), "dcp.metadata", unsummed=True),
    Format(
        "distcp", names.by_end(".distcp"), "dcp.distcp", explained_beside=True, suffixes=(".distcp",), holds="pieces"
    ),
    Format("safetensors", names.is_safetensors, "safetensors", unsummed=True, suffixes=(".safetensors",)),
    Format("torch_zip", names.is_torch_zip, "torch.zip_file", suffixes=TORCH_SUFFIXES),
    Format("torch_legacy", names.is_torch_legacy, "torch.pickle_files", "read_legacy", unsummed=True),
    Format(
        "pickle", names.is_pickle, "torch.pickle_files", unsummed=True, suffixes=(".pkl", ".pickle"), holds="objects"
    ),
    Format("hf_index", names.by_end(".index.json"), "json_files", "read_index"),
    Format("trainer_state", names.by_name("trainer_state.json"), "json_files", "read_trainer_state"),
    Format("ckptguard_state", names.is_own_state, "json_files", "read_own_state"),
    Format("config_json", names.by_end("config.json", "model_index.json"), "json_files"),
    Format("pointer", names.is_pointer, "text_files", "read_pointer"),
    Format("yaml", names.by_end(".yaml", ".yml"), "text_files", "read_yaml"),
    # The name promises tensors, but the bytes fit no format.
    Format("unrecognised", lambda path, head: names.has_tensor_suffix(path), "opaque"),
    Format("opaque", lambda path, head: True, "opaque"),
)

# Formats for which only a recorded digest shows that a file is as it was written.
UNSUMMED = frozenset(row.name for row in FORMATS if row.unsummed)


def format_of(path: str, head: bytes) -> Format:
    """Return the row for a file with this name and these first bytes; "opaque" if no format claims it."""
    return next(row for row in FORMATS if row.matches(path, head))


def read_structure(reader: Reader, path: str, beside: Beside = lambda name: None) -> Structure:
    """Return the structure of one file, for any bytes. It raises only the reader's errors.

    `beside(name)` returns the structure of a file in the same folder, or None.
    """
    head = reader.read(0, min(reader.entry.size, HEAD))
    row = format_of(path, head)
    # Most commands meet one or two formats, so the readers of the others are not loaded.
    read = getattr(importlib.import_module(f"ckptguard.formats.{row.module}"), row.read)
    running = gc.isenabled()
    # Readers build no cycles, and a garbage collection takes as long as the reading itself.
    gc.disable()
    try:
        found: Structure = read(reader, path, beside) if row.explained_beside else read(reader, path)
    finally:
        if running:
            gc.enable()
    return found
