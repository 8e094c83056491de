"""The folder for files that are valid only on this machine, until its next start."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping


def private_runtime_folder(environ: Mapping[str, str]) -> str:
    """Return a private folder of this user, and create it if necessary. Raises OSError if that fails."""
    above = environ.get("XDG_RUNTIME_DIR")
    folder = os.path.join(above, "ckptguard") if above and os.path.isabs(above) else None
    if folder is None or not os.path.isdir(os.path.dirname(folder)):
        import tempfile  # it imports much, and most machines have the other folder

        folder = os.path.join(tempfile.gettempdir(), f"ckptguard-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    require_private(folder)
    return folder


def require_private(folder: str) -> None:
    """Raise PermissionError if other users may change files in this folder, or if it is not a folder."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user can access")


def read_private(path: str, most: int) -> bytes | None:
    """Return the content of a file of this user; None if there is no such file, or if it has more than `most` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_size > most:
                return None
            return file.read(most)
    except OSError:
        return None
