"""``config.json``, ``adapter_config.json`` and their like: nothing loads when a killed writer left half of one."""

from __future__ import annotations

import json
import re

from ckptguard.formats.structure import Structure, broken
from ckptguard.storage.protocol import Reader

NAME = "config_json"
MAX_SIZE = 16 << 20
# Settings that people write by hand may have comments, which only their own reader knows.
_COMMENT = re.compile(r"^[ \t]*(?://|/\*|#)", re.MULTILINE)


def read(reader: Reader, path: str) -> Structure:
    """Nothing but whether it is JSON at all. Duplicate keys and bare NaN are no fault here: Python writes and reads
    them."""
    size = reader.entry.size
    if size > MAX_SIZE:
        return Structure(format=NAME)
    try:
        text = reader.read(0, size).decode("utf-8")
    except UnicodeDecodeError:
        return broken(NAME, "it is not UTF-8")
    if not text.strip():
        return broken(NAME, "it is empty")
    try:
        json.loads(text)
    except RecursionError:
        return broken(NAME, "it is nested too deeply")
    except ValueError as error:
        if "\0" in text or not _COMMENT.search(text):
            return broken(NAME, f"it is no JSON: {str(error)[:200]}")
    return Structure(format=NAME)
