"""The one place where foreign exceptions become ours."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ckptguard.errors import (
    CouldNotTellError,
    DeniedError,
    ObjectExistsError,
    ObjectMissingError,
    StorageError,
    StorageFullError,
)
from ckptguard.names import escape

_MISSING = {errno.ENOENT, errno.ENOTDIR}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def storage_error(error: BaseException, key: str, where: str) -> StorageError:
    """Our error for a foreign one; `where` is the storage's URL or path, for people."""
    place = escape(f"{where}/{key}" if key else where)
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FileNotFoundError | NotADirectoryError) or code in _MISSING:
        return ObjectMissingError(f"{place}: there is no such object", key=key)
    if isinstance(error, FileExistsError) or code == errno.EEXIST:
        return ObjectExistsError(f"{place}: exists already", key=key)
    if isinstance(error, PermissionError) or code in _DENIED:
        reason = os.strerror(code) if code is not None else "no permission"
        return DeniedError(f"{place}: {reason.lower()}", key=key, hint="check the owner and the mode of this path")
    if code in _FULL:
        why = "no space left on device" if code == errno.ENOSPC else f"no space left ({os.strerror(code or 0).lower()})"
        return StorageFullError(f"{place}: {why}", key=key, hint="free some space and try again")
    reason = os.strerror(code).lower() if code is not None else f"{type(error).__name__}: {escape(str(error))}"
    return StorageError(f"{place}: {reason}", key=key)


@contextlib.contextmanager
def translated(key: str, where: str) -> Iterator[None]:
    """Only StorageError and its kinds (and what is ours already) leave this block."""
    try:
        yield
    except CouldNotTellError:
        raise
    except Exception as error:
        raise storage_error(error, key, where) from error
