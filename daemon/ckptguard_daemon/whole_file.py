"""Files that are always whole: another process sees the old content or the new one."""

from __future__ import annotations

import contextlib
import os
import tempfile


def replace_file(path: str, content: bytes, mode: int = 0o600) -> None:
    """Replace a file, or leave it as it was. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(prefix=".ckptguard-", suffix=".tmp", dir=os.path.dirname(path))
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
