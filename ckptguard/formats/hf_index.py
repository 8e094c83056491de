"""Hugging Face's ``*.index.json``: which shard holds which tensor."""

from __future__ import annotations

from ckptguard.formats.strict_json import JsonProblem, printable, read_object
from ckptguard.formats.structure import Structure, broken
from ckptguard.storage.protocol import Reader
from ckptguard.values.ids import is_safe_path

NAME = "hf_index"
MAX_INDEX = 64 << 20


def read(reader: Reader, path: str) -> Structure:
    """The index's weight map; anything else than a map from tensors to plain file names is a problem."""
    try:
        index = read_object(reader, MAX_INDEX)
    except JsonProblem as error:
        return broken(NAME, f"the index cannot be read: {error}", truncated=error.ends_early)
    weights = index.get("weight_map")
    if not isinstance(weights, dict):
        return broken(NAME, "the index has no weight_map")
    unsafe = [name for name in weights.values() if not isinstance(name, str) or not is_safe_path(name)]
    if unsafe:
        return broken(NAME, f"the index names {printable(str(unsafe[0]))!r}, which is no plain file name")
    return Structure(format=NAME, weight_map=weights)
