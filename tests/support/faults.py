"""What befalls a file on a disk."""

from __future__ import annotations

import os
from pathlib import Path


def flip(path: Path, place: int | None = None, mask: int = 1, *, new_times: bool = False) -> None:
    """Flip bits of one byte, in the middle of a file unless told otherwise.

    Its times stay, as failing hardware leaves them, unless it is to look as if somebody wrote it.
    """
    before = path.stat()
    place = before.st_size // 2 if place is None else place % before.st_size
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ mask]))
    if not new_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
