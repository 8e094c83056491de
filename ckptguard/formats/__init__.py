"""File formats: how one file stores tensors. A new format is one file here and one row in the table,
which is in `table.py`. CONTRIBUTING.md says what else it needs.

Nothing here imports torch or numpy. Nothing that a file names is ever imported or called.
"""

from __future__ import annotations

import gc
import importlib

from ckptguard.formats.stand_ins import stand_in
from ckptguard.formats.structure import Beside, Format, Leaf, Source, Structure, broken
from ckptguard.formats.table import FIRST_BYTES, FORMATS, format_of, tensor_suffix
from ckptguard.values.manifest import BY_PLUGIN

__all__ = ["FORMATS", "UNSUMMED", "Format", "Leaf", "Structure", "format_of", "read_structure", "tensor_suffix"]

# Formats for which only a recorded digest shows that a file is as it was written.
UNSUMMED = frozenset((BY_PLUGIN, *(row.name for row in FORMATS if row.unsummed)))


def read_structure(reader: Source, path: str, beside: Beside = lambda name: None) -> Structure:
    """Return the structure of one file, for any bytes. It raises only the reader's errors.

    `beside(name)` returns the structure of a file in the same folder, or None.
    """
    head = reader.read(0, min(reader.entry.size, FIRST_BYTES))
    row = format_of(path, head)
    wrong = stand_in(path, head, reader.entry.size)
    if wrong is not None:
        return broken(row.name, wrong)
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
