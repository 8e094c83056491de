"""``config.json``, ``adapter_config.json`` and their like: nothing loads when a killed writer left half of one."""

from __future__ import annotations

import json
import re

from ckptguard.formats.structure import Format, Structure, broken
from ckptguard.formats.suffixes import name_of
from ckptguard.storage.protocol import Reader

MAX_SIZE = 16 << 20
# Settings that people write by hand may have comments, which only their own reader knows.
_COMMENT = re.compile(r"^[ \t]*(?://|/\*|#)", re.MULTILINE)


def matches(path: str, head: bytes) -> bool:
    """By the end of the name."""
    return name_of(path).endswith(("config.json", "model_index.json"))


def read(reader: Reader, path: str) -> Structure:
    """Nothing but whether it is JSON at all. Duplicate keys and bare NaN are no fault here: Python writes and reads
    them."""
    size = reader.entry.size
    if size > MAX_SIZE:
        return Structure(format=FORMAT.name)
    try:
        text = reader.read(0, size).decode("utf-8")
    except UnicodeDecodeError:
        return broken(FORMAT.name, "it is not UTF-8")
    if not text.strip():
        return broken(FORMAT.name, "it is empty")
    try:
        json.loads(text)
    except RecursionError:
        return broken(FORMAT.name, "it is nested too deeply")
    except ValueError as error:
        if "\0" in text or not _COMMENT.search(text):
            return broken(FORMAT.name, f"it is no JSON: {str(error)[:200]}")
    return Structure(format=FORMAT.name)


FORMAT = Format(name="config_json", matches=matches, read=read)
