"""By which name and first bytes a file is known for one of a format. Light: no reader is loaded for it."""

from __future__ import annotations

import re
from collections.abc import Callable

from ckptguard.formats.suffixes import has_tensor_suffix, is_pickle_name, name_of

LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
LARGEST_SAFETENSORS_HEADER = 100_000_000  # the limit of the reference implementation
DISTCP_SUFFIX = ".distcp"
_ZIP_MAGIC = b"PK\x03\x04"
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x78\x01", b"\x78\x9c", b"\x78\xda", b"\x28\xb5\x2f\xfd")
_OWN_STATE = re.compile(r"(?:.*/)?step-\d{9,12}/state\.json")

Rule = Callable[[str, bytes], bool]  # of a path and the file's first bytes


def by_end(*ends: str) -> Rule:
    """By the end of the name alone."""
    return lambda path, head: name_of(path).endswith(ends)


def by_name(*names: str) -> Rule:
    """By the name alone."""
    return lambda path, head: name_of(path) in names


is_pointer = by_name("latest", "latest_universal", "latest_checkpointed_iteration.txt")


def is_safetensors(path: str, head: bytes) -> bool:
    """By the suffix alone; or, under another tensor suffix, by a plausible length followed by an opening brace."""
    if path.lower().endswith(".safetensors"):
        return True
    plausible = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= LARGEST_SAFETENSORS_HEADER
    return plausible and has_tensor_suffix(path)


def is_torch_zip(path: str, head: bytes) -> bool:
    """By the magic of a zip archive, and a tensor suffix, a pickle's, or the record that torch begins with: the user
    may have called a checkpoint anything."""
    return head.startswith(_ZIP_MAGIC) and (has_tensor_suffix(path) or is_pickle_name(path) or b"/data.pkl" in head)


def is_torch_legacy(path: str, head: bytes) -> bool:
    """By a tensor suffix (or a pickle's) and the magic number that these files begin with."""
    return head.startswith(LEGACY_MAGIC) and (has_tensor_suffix(path) or is_pickle_name(path))


def is_pickle(path: str, head: bytes) -> bool:
    """By a pickle's suffix, unless compressed; by a tensor suffix only with the mark of a binary pickle."""
    if is_pickle_name(path):
        return not head.startswith(_COMPRESSED)
    return has_tensor_suffix(path) and len(head) > 2 and head[0] == 0x80 and head[1] <= 5


def is_own_state(path: str, head: bytes) -> bool:
    """By the name, in a folder of our layout."""
    return _OWN_STATE.fullmatch(path) is not None
