"""A ``.yaml`` beside weights, as WeNet writes it: only the step and the epoch at its top level are looked at."""

from __future__ import annotations

import re

from ckptguard.formats.structure import Leaf, Problem, Structure
from ckptguard.storage.protocol import Reader

NAME = "yaml"
_LONGEST = 4 << 20
_NUMBER = re.compile(rb"^(step|epoch):[ \t]*(\d{1,18})[ \t]*\r?$", re.MULTILINE)


def read(reader: Reader, path: str) -> Structure:
    """Leaves ``step`` and ``epoch``, where there are such lines. No YAML is parsed.

    ``metadata["ends"]`` says how it ends: with a whole "line" as every writer of YAML leaves it, or "early".
    """
    size = reader.entry.size
    text = reader.read(0, min(size, _LONGEST))
    if b"\0" in text and not text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Structure(format=NAME, problems=(Problem(message="it holds zero bytes, which no YAML does"),))
    ends = "line" if size > _LONGEST or text.endswith(b"\n") else "early"
    numbers = {word.decode(): int(digits) for word, digits in _NUMBER.findall(text)}
    leaves = tuple(Leaf(word, number) for word, number in numbers.items())
    return Structure(format=NAME, leaves=leaves, metadata={"ends": ends})
