"""The folder for what means something on this machine alone, and only until it is started again."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping


def private_runtime_folder(environ: Mapping[str, str]) -> str:
    """A folder that is ours alone, made if it is not there; OSError if there is none to be had."""
    above = environ.get("XDG_RUNTIME_DIR")
    folder = os.path.join(above, "ckptguard") if above and os.path.isabs(above) else None
    if folder is None or not os.path.isdir(os.path.dirname(folder)):
        folder = os.path.join(tempfile.gettempdir(), f"ckptguard-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    require_private(folder)
    return folder


def require_private(folder: str) -> None:
    """PermissionError if others than this user may change what lies in this folder, or it is none."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
