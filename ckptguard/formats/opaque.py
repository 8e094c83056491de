"""Files that ckptguard does not look into: all others, and files named like tensors whose bytes fit no format."""

from __future__ import annotations

import re

from ckptguard.formats.structure import Source, Structure, broken
from ckptguard.formats.suffixes import has_tensor_suffix, may_be_foreign, promises_state

NAME = "opaque"
_LONGEST_TEXT = 1 << 20
# Text that replaces something else: a part of a pickle of protocol 0, an archive's first bytes, or what a failed
# download or checkout leaves.
_STANDS_FOR_OTHERS = re.compile(rb"\(|c[\w.]+\n|PK?\Z|\s*<|version https://git-lfs")
_TAIL = 1024
_END_OF_ARCHIVE = b"PK\x05\x06"


def read(reader: Source, path: str) -> Structure:
    """Return nothing, or a problem if the name promises tensors, because no other format has claimed the file."""
    size = reader.entry.size
    if not has_tensor_suffix(path):
        return Structure(format=NAME)
    if size == 0:
        return broken("unrecognised", "the file is empty", truncated=True)
    message = "it is neither a torch archive, nor safetensors, nor a pickle"
    head = reader.read(0, min(size, 64))
    foreign = may_be_foreign(path) and any(head)
    if not foreign and not promises_state(path) and _is_plain_text(reader, size):
        return Structure(format="unrecognised", metadata={"unrecognised": message})
    # If an archive's directory is at the end, its first bytes are damaged.
    if foreign and _END_OF_ARCHIVE not in reader.read(max(0, size - _TAIL), min(size, _TAIL)):
        return Structure(format=NAME, metadata={"unrecognised": message})
    # A writer that sets the full length first leaves zeros in place of its first bytes.
    return broken("unrecognised", message, truncated=not any(head) or size < 4)


def _is_plain_text(reader: Source, size: int) -> bool:
    """True if it is a short text, such as the counters that SpeechBrain keeps beside weights (``counter.ckpt``)."""
    if size > _LONGEST_TEXT:
        return False
    raw = reader.read(0, size)
    try:
        lines = raw.decode("utf-8").replace("\t", " ").splitlines()
    except UnicodeDecodeError:
        return False
    if not all(line.isprintable() for line in lines) or _STANDS_FOR_OTHERS.match(raw) is not None:
        return False
    from ckptguard.formats.pickle.constants import PickleProblem  # loaded only for such texts
    from ckptguard.formats.pickle.machine import read_pickle

    try:
        return not raw.endswith(b".") or read_pickle(raw).end != size
    except PickleProblem:
        return True
