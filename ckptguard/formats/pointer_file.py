"""A file whose one line names a checkpoint: DeepSpeed's ``latest``, Megatron's tracker file."""

from __future__ import annotations

from ckptguard.formats.structure import Structure
from ckptguard.storage.protocol import Reader
from ckptguard.values.ids import is_safe_path

NAME = "pointer"
_LONGEST = 1024


def read(reader: Reader, path: str) -> Structure:
    """What it points to, as ``metadata["points_to"]``, if it is one line with a plain name. Whether it must be one,
    its layout knows."""
    text = reader.read(0, min(reader.entry.size, _LONGEST + 1))
    try:
        name = text.decode("utf-8").strip()
    except UnicodeDecodeError:
        name = ""
    plain = len(text) <= _LONGEST and name.isprintable() and is_safe_path(name)
    return Structure(format=NAME, metadata={"points_to": name} if plain else {})
