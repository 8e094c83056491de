"""Small texts beside weights: pointers such as DeepSpeed's ``latest``, and WeNet's ``.yaml``."""

from __future__ import annotations

import re

from ckptguard.formats.structure import Leaf, Structure, broken
from ckptguard.storage.protocol import Reader
from ckptguard.values.ids import is_safe_path

_LONGEST_POINTER = 1024
_LONGEST_YAML = 4 << 20
_NUMBER = re.compile(rb"^(step|epoch):[ \t]*(\d{1,18})[ \t]*\r?$", re.MULTILINE)


def read_pointer(reader: Reader, path: str) -> Structure:
    """Return the checkpoint that its one line names, as ``metadata["points_to"]``; nothing if it is not a plain name.

    The layout knows whether it must be one.
    """
    text = reader.read(0, min(reader.entry.size, _LONGEST_POINTER + 1))
    try:
        name = text.decode("utf-8").strip()
    except UnicodeDecodeError:
        name = ""
    plain = len(text) <= _LONGEST_POINTER and name.isprintable() and is_safe_path(name)
    return Structure(format="pointer", metadata={"points_to": name} if plain else {})


def read_yaml(reader: Reader, path: str) -> Structure:
    """Return ``step`` and ``epoch`` from top-level lines, without parsing YAML.

    ``metadata["ends"]`` says how it ends: with a whole "line", as every YAML writer leaves it, or "early".
    """
    size = reader.entry.size
    text = reader.read(0, min(size, _LONGEST_YAML))
    if b"\0" in text and not text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return broken("yaml", "it holds zero bytes, which YAML never does")
    ends = "line" if size > _LONGEST_YAML or text.endswith(b"\n") else "early"
    numbers = {word.decode(): int(digits) for word, digits in _NUMBER.findall(text)}
    leaves = tuple(Leaf(word, number) for word, number in numbers.items())
    return Structure(format="yaml", leaves=leaves, metadata={"ends": ends})
