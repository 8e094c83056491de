"""Keys: which are allowed, and how they are taken apart."""

from __future__ import annotations

from ckptguard.errors import DeniedError
from ckptguard.values.ids import escape


def is_encodable(name: str) -> bool:
    """Whether the name is valid Unicode; names that a file system holds as other bytes carry surrogates."""
    return name.isascii() or not any("\ud800" <= c <= "\udfff" for c in name)


def is_plain(name: str) -> bool:
    """Whether one listed name can be a part of a key."""
    return name not in ("", ".", "..") and "\0" not in name and "/" not in name and is_encodable(name)


def parts_of(key: str) -> list[str]:
    """The parts of a key; DeniedError for anything that could lead outside the root. The root has no parts."""
    parts = key.split("/") if key else []
    if not all(map(is_plain, parts)):
        raise DeniedError(f"not a key: {escape(key)!r}", key=escape(key))
    return parts


def join(folder: str, name: str) -> str:
    """The key of a name in a folder."""
    return f"{folder}/{name}" if folder else name
