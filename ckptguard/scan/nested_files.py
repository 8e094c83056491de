"""Files inside tensors of bytes, such as the pickled state of a layer (`_extra_state`)."""

from __future__ import annotations

import msgspec

from ckptguard.formats.pickle.long_values import InMemory
from ckptguard.formats.structure import Found, Structure, TensorPlace, holds_bytes
from ckptguard.formats.table import may_begin_file
from ckptguard.formats.torch.files import ReadingBudget, take_file
from ckptguard.scan.byte_pass import HEAD
from ckptguard.storage.protocol import Reader

_LARGEST = 64 << 20
_OF_A_LAYER = "_extra_state"  # torch's name for what a layer saves in its own way


def open_nested(reader: Reader, structure: Structure, heads: dict[int, bytes]) -> Structure:
    """Add the numbers and names of nested files to the structure. `heads` are the first bytes of spans, by number.

    Other bytes stay bytes, unless a layer saved them. Bytes that only look like a file are reported as unread.
    """
    found, room = Found(), ReadingBudget()
    opened: set[str] = set()
    for tensor in structure.tensors:
        if tensor.span not in heads or not holds_bytes(tensor) or tensor.start == tensor.stop:
            continue
        before = len(found.unread)
        raw = _bytes_of(reader, structure, tensor, heads[tensor.span])
        if raw is not None and take_file(found, tensor.name, InMemory(raw), room):
            opened.add(tensor.name)
        elif tensor.name.endswith(_OF_A_LAYER) and len(found.unread) == before:
            found.unread.append(tensor.name)
    if not (found.leaves or found.names or found.unread or opened):
        return structure
    unread = (*(name for name in structure.unread if name not in opened), *found.unread)
    return msgspec.structs.replace(
        structure,
        leaves=(*structure.leaves, *found.leaves),
        unread=tuple(dict.fromkeys(unread)),
        globals=tuple(sorted({*structure.globals, *found.names})),
    )


def _bytes_of(reader: Reader, structure: Structure, tensor: TensorPlace, head: bytes) -> bytes | None:
    """Return all bytes of a tensor that begins like a file, else None."""
    assert tensor.span is not None
    begin, size = structure.spans[tensor.span].offset + tensor.start, tensor.stop - tensor.start
    if tensor.start or len(head) < min(size, HEAD):
        head = reader.read(begin, min(size, HEAD))
    return reader.read(begin, min(size, _LARGEST)) if may_begin_file(head[:size]) else None
