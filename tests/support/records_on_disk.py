"""Where keys of a run lie on a local disk, and the reverse."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckptguard.storage import open_storage


def at(root: str | os.PathLike[str], key: str) -> Path:
    """The path of a key of the run at `root`, also of one in its records."""
    return Path(open_storage(root, must_exist=False).path_of(key.rstrip("/")))


def key_of(root: str | os.PathLike[str], path: Path) -> str:
    """The key of a path."""
    parts = path.relative_to(root).parts
    return "/".join(re.sub(r"\Aheld\.(.+)\.held\Z", r"\1", part) for part in parts)


def files_of(root: str | os.PathLike[str], folder: str = "") -> dict[str, bytes]:
    """The bytes of every file below a folder, by keys relative to it."""
    above = at(root, folder) if folder else Path(root)
    return {key_of(above, path): path.read_bytes() for path in above.rglob("*") if path.is_file()}
