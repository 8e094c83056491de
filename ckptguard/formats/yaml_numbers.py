"""A ``.yaml`` beside weights, as WeNet writes it: only the step and the epoch at its top level are looked at."""

from __future__ import annotations

import re

from ckptguard.formats.structure import Format, Leaf, Structure
from ckptguard.formats.suffixes import name_of
from ckptguard.storage.protocol import Reader

_LONGEST = 4 << 20
_NUMBER = re.compile(rb"^(step|epoch):[ \t]*(\d{1,18})[ \t]*\r?$", re.MULTILINE)


def matches(path: str, head: bytes) -> bool:
    """By the suffix."""
    return name_of(path).endswith((".yaml", ".yml"))


def read(reader: Reader, path: str) -> Structure:
    """Leaves ``step`` and ``epoch``, where there are such lines. No YAML is parsed."""
    text = reader.read(0, min(reader.entry.size, _LONGEST))
    numbers = {word.decode(): int(digits) for word, digits in _NUMBER.findall(text)}
    leaves = tuple(Leaf(word, number) for word, number in numbers.items())
    return Structure(format=FORMAT.name, leaves=leaves)


FORMAT = Format(name="yaml", matches=matches, read=read, holds_tensors=False)
