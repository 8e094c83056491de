"""Files that ckptguard does not look into: all others, and files named like tensors whose bytes fit no format."""

from __future__ import annotations

import json
import re

from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import Beside, Source, Structure, broken
from ckptguard.formats.table import has_tensor_suffix, may_be_foreign, promises_state

NAME = "opaque"
_LONGEST_TEXT = 1 << 20
# The beginning of something else: a part of a pickle of protocol 0, an archive's first bytes, or a page.
_STANDS_FOR_OTHERS = re.compile(rb"\(|c[\w.]+\n|PK?\Z|\s*<")
_SPEECHBRAIN = "CKPT.yaml"  # in each of its folders; it writes texts under names that promise tensors
_ERROR_KEYS = frozenset(("error", "errors", "message", "detail", "code"))
_TAIL = 1024
_END_OF_ARCHIVE = b"PK\x05\x06"


def read(reader: Source, path: str, beside: Beside = lambda name: None) -> Structure:
    """Return nothing, or a problem if the name promises tensors, because no other format has claimed the file.

    A text is one, too, except where a layout writes texts under such names, which a file beside it shows.
    """
    size = reader.entry.size
    if not has_tensor_suffix(path):
        return Structure(format=NAME)
    if size == 0:
        return broken("unrecognised", "the file is empty", truncated=True)
    message = "it is neither a torch archive, nor safetensors, nor a pickle"
    head = reader.read(0, min(size, 64))
    foreign = may_be_foreign(path) and any(head)
    text = _plain_text(reader, size)
    if text and is_error_answer(text):
        return broken("unrecognised", f"this is the answer of a server, not the file: {printable(text.strip(), 100)}")
    if text and not foreign:
        message += f", but a text: {printable(text.strip(), 60)!r}"
        if not promises_state(path) and beside(_SPEECHBRAIN) is not None:
            return Structure(format="unrecognised", metadata={"unrecognised": message})
    # If an archive's directory is at the end, its first bytes are damaged.
    if foreign and _END_OF_ARCHIVE not in reader.read(max(0, size - _TAIL), min(size, _TAIL)):
        return Structure(format=NAME, metadata={"unrecognised": message})
    # A writer that sets the full length first leaves zeros in place of its first bytes.
    return broken("unrecognised", message, truncated=not any(head) or size < 4)


def is_error_answer(text: str) -> bool:
    """True for the JSON with which servers say that they do not send a file."""
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not _ERROR_KEYS.isdisjoint(map(str.lower, value))


def _plain_text(reader: Source, size: int) -> str:
    """Return a short text, such as the counters that SpeechBrain keeps beside weights (``counter.ckpt``); "" for
    anything else."""
    if size > _LONGEST_TEXT:
        return ""
    raw = reader.read(0, size)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    plain = all(line.isprintable() for line in text.replace("\t", " ").splitlines())
    return text if plain and not _STANDS_FOR_OTHERS.match(raw) and not _is_pickle(raw) else ""


def _is_pickle(raw: bytes) -> bool:
    """True for a whole pickle of protocol 0, which is text."""
    from ckptguard.formats.pickle.constants import PickleProblem  # loaded only for such texts
    from ckptguard.formats.pickle.machine import read_pickle

    try:
        return raw.endswith(b".") and read_pickle(raw).end == len(raw)
    except PickleProblem:
        return False
