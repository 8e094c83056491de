"""Files that we do not look into: any other file, and files whose name promises tensors but whose bytes fit nothing."""

from __future__ import annotations

from ckptguard.formats.structure import Problem, Structure
from ckptguard.formats.suffixes import has_tensor_suffix, may_be_foreign
from ckptguard.storage.protocol import Reader

_TAIL = 1024
_END_OF_ARCHIVE = b"PK\x05\x06"


NAME = "opaque"


def read(reader: Reader, path: str) -> Structure:
    """Nothing, but for a file whose name promises tensors: that no other format has claimed it is a problem."""
    return _read_unrecognised(reader, path) if has_tensor_suffix(path) else Structure(format=NAME)


def _read_unrecognised(reader: Reader, path: str) -> Structure:
    if reader.entry.size == 0:
        return Structure(format="unrecognised", problems=(Problem(message="the file is empty"),), truncated=True)
    message = "it is neither a torch archive, nor safetensors, nor a pickle"
    head = reader.read(0, min(reader.entry.size, 64))
    # A writer that sets the full length first leaves zeros where its first bytes will stand.
    unwritten = not any(head) or reader.entry.size < 4
    if may_be_foreign(path) and any(head) and not _ends_as_archive(reader):
        return Structure(format=NAME, metadata={"unrecognised": message})
    return Structure(format="unrecognised", problems=(Problem(message=message),), truncated=unwritten)


def _ends_as_archive(reader: Reader) -> bool:
    """Whether a zip archive's directory stands at the end: then its first bytes are damaged."""
    length = min(reader.entry.size, _TAIL)
    return _END_OF_ARCHIVE in reader.read(reader.entry.size - length, length)
