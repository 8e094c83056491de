"""File formats: how one file stores tensors. A new format is one file here and one line in the table.

Nothing here imports torch or numpy, and nothing that a file names is ever imported or called.
"""

from __future__ import annotations

from ckptguard.formats import hf_index, opaque, own_state, safetensors, trainer_state, yaml_numbers
from ckptguard.formats import json_files as config_json
from ckptguard.formats import pointer_file as pointer
from ckptguard.formats.dcp import distcp
from ckptguard.formats.dcp import metadata as dcp_metadata
from ckptguard.formats.gc_pause import collection_paused
from ckptguard.formats.numpy import npy, npz
from ckptguard.formats.structure import Beside, Format, Leaf, Problem, SpanPlace, Structure, TensorPlace
from ckptguard.formats.suffixes import tensor_suffix
from ckptguard.formats.torch import bare_pickle
from ckptguard.formats.torch import legacy_file as torch_legacy
from ckptguard.formats.torch import zip_file as torch_zip
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

# The first row that matches reads the file.
FORMATS: tuple[Format, ...] = (
    npz.FORMAT,
    npy.FORMAT,
    dcp_metadata.FORMAT,
    distcp.FORMAT,
    safetensors.FORMAT,
    torch_zip.FORMAT,
    torch_legacy.FORMAT,
    bare_pickle.FORMAT,
    hf_index.FORMAT,
    trainer_state.FORMAT,
    own_state.FORMAT,
    config_json.FORMAT,
    pointer.FORMAT,
    yaml_numbers.FORMAT,
    opaque.UNRECOGNISED,
    opaque.FORMAT,
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
    with collection_paused():
        return row.read(reader, path) if row.read_beside is None else row.read_beside(reader, path, beside)
