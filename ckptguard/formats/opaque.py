"""Files that we do not look into: any other file, and files whose name promises tensors but whose bytes fit nothing."""

from __future__ import annotations

from ckptguard.formats.structure import Structure, broken
from ckptguard.formats.suffixes import has_tensor_suffix, may_be_foreign
from ckptguard.storage.protocol import Reader

NAME = "opaque"
_TAIL = 1024
_END_OF_ARCHIVE = b"PK\x05\x06"


def read(reader: Reader, path: str) -> Structure:
    """Nothing, but for a file whose name promises tensors: that no other format has claimed it is a problem."""
    size = reader.entry.size
    if not has_tensor_suffix(path):
        return Structure(format=NAME)
    if size == 0:
        return broken("unrecognised", "the file is empty", truncated=True)
    message = "it is neither a torch archive, nor safetensors, nor a pickle"
    head = reader.read(0, min(size, 64))
    foreign = may_be_foreign(path) and any(head)
    # Where an archive's directory stands at the end, its first bytes are damaged.
    if foreign and _END_OF_ARCHIVE not in reader.read(max(0, size - _TAIL), min(size, _TAIL)):
        return Structure(format=NAME, metadata={"unrecognised": message})
    # A writer that sets the full length first leaves zeros where its first bytes will stand.
    return broken("unrecognised", message, truncated=not any(head) or size < 4)
