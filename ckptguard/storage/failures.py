"""The one place that turns foreign exceptions into ours."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from ckptguard.errors import (
    CouldNotTellError,
    DeniedError,
    ObjectExistsError,
    ObjectMissingError,
    StorageError,
    StorageFullError,
    TransientError,
)
from ckptguard.storage.redaction import redacted
from ckptguard.values.ids import escape

_MISSING = {errno.ENOENT, errno.ENOTDIR}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP}
UNREADABLE = {errno.EACCES, errno.EPERM, errno.EIO}  # wrong with one place, and not with the machine or the mount
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PASSING = {
    *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, errno.EPIPE),
    *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENOTCONN),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    getattr(errno, "EREMOTEIO", errno.EAGAIN),  # s3fs uses it for "internal error"
}
_HTTP_MISSING, _HTTP_DENIED, _HTTP_FULL = {404, 410}, {401, 403}, {507}
_HTTP_PASSING = {408, 425, 429, 500, 502, 503, 504, 509}

_NO_BUCKET = re.compile(r"\b(?:bucket|container)\b.*\b(?:does not exist|not found)", re.IGNORECASE | re.DOTALL)

# Classes of libraries that may not be installed, by name.
_PASSING_NAMES = {
    *("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"),  # aiohttp
    *("HTTPClientError", "ConnectionClosedError"),  # botocore
    *("IncompleteReadError", "ResponseStreamingError"),  # botocore
    *("ServiceRequestError", "ServiceResponseError", "IncompleteReadError"),  # azure
    *("ConnectionLost", "ChannelOpenError", "SFTPConnectionLost", "SFTPNoConnection"),  # asyncssh
    *("RequestException", "gaierror", "IncompleteRead"),
}
_DENIED_NAMES = {
    *("ClientAuthenticationError", "DefaultCredentialsError", "RefreshError"),  # azure, google
    *("PermissionDenied", "SFTPPermissionDenied", "HostKeyNotVerifiable", "KeyEncryptionError", "KeyImportError"),
}


def is_unreadable(error: StorageError) -> bool:
    """True if one place cannot be read, as a folder that is closed. What is wrong with the machine, or passes, is
    another matter."""
    return isinstance(error, DeniedError) or getattr(error.__cause__, "errno", None) in UNREADABLE


def storage_error(error: BaseException, key: str, where: str) -> StorageError:
    """Return our error for a foreign one. `where` is the storage's URL or path, for people. The text holds no
    secret."""
    place = escape(redacted(f"{where}/{key}" if key else where))
    code = error.errno if isinstance(error, OSError) else None
    status = _status(error)
    names = [kind.__name__ for each in _chain(error) for kind in type(each).__mro__]
    said = _answered(error)[0] if "://" in where else ""
    if isinstance(error, FileNotFoundError | NotADirectoryError) or code in _MISSING or status in _HTTP_MISSING:
        if said == "NoSuchBucket" or any(_NO_BUCKET.search(str(each)) for each in _chain(error)):
            bucket = escape(redacted("/".join(where.split("/")[:3])))
            return ObjectMissingError(f"there is no bucket {bucket}", key=key, hint="make it, or check its name")
        what = "object" if "://" in where else "file"
        return ObjectMissingError(f"{place}: there is no such {what}", key=key)
    if isinstance(error, FileExistsError) or code == errno.EEXIST:
        return ObjectExistsError(f"{place}: exists already", key=key)
    from ckptguard.storage.service_codes import MEANINGS, UNTRUSTED  # a command that succeeds needs none of them

    untrusted = [UNTRUSTED] if UNTRUSTED in str(error) else []
    answer = next((name for name in (said, *untrusted, *names) if name in MEANINGS), None)
    if answer is not None:
        meaning = MEANINGS[answer]
        return meaning.kind(f"{place}: {meaning.text} ({answer})", key=key, hint=meaning.hint)
    if isinstance(error, PermissionError) or code in _DENIED or status in _HTTP_DENIED or _DENIED_NAMES & {*names}:
        return _denied(error, code if code in _DENIED and not said else None, key, place)
    if code in FULL or status in _HTTP_FULL:
        full = code in (errno.ENOSPC, None)
        why = "no space left on device" if full else f"no space left ({os.strerror(code or 0).lower()})"
        return StorageFullError(f"{place}: {why}", key=key, hint="free some space and try again")
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        hint = "look at the names in [storage] of ckptguard.toml, and in fsspec's configuration"
        return StorageError(f"{place}: an option of this storage is not known: {_said(error)}", key=key, hint=hint)
    reason = os.strerror(code).lower() if code is not None and not status else _said(error)
    lost = any(isinstance(each, TimeoutError | ConnectionError | EOFError) for each in _chain(error))
    passing = lost or _PASSING_NAMES & {*names}
    if status in _HTTP_PASSING or (status is None and (code in _PASSING or passing)):
        return TransientError(f"{place}: {reason}", key=key)
    return StorageError(f"{place}: {reason}", key=key)


@contextlib.contextmanager
def translated(key: str, where: str) -> Iterator[None]:
    """Let only StorageError and its kinds, and our own errors, leave this block."""
    try:
        yield
    except CouldNotTellError:
        raise
    except Exception as error:
        raise storage_error(error, key, where) from error


def machine_trouble(error: BaseException) -> CouldNotTellError | None:
    """Return our error if the machine lacks a resource; None if it may be a mistake of ours."""
    # C code that has no memory for its error leaves none, which Python then complains about.
    without = ("without exception set", "without setting an exception")
    lost = isinstance(error, SystemError) and any(words in str(error) for words in without)
    if isinstance(error, MemoryError) or lost:
        return CouldNotTellError("there is not enough memory", hint="see ulimit -v, and which other programs run here")
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return CouldNotTellError("no more threads can be started", hint="see ulimit -u and ulimit -v")
    if isinstance(error, ImportError):
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return CouldNotTellError(
            f"a part of this program cannot be loaded ({escape(first.strip()[:200])})",
            hint="see ulimit -v and ulimit -n, or reinstall ckptguard, if a part of it is missing",
        )
    if isinstance(error, OSError):
        place = f"{escape(os.fsdecode(error.filename))}: " if isinstance(error.filename, str | bytes) else ""
        return CouldNotTellError(f"{place}{(error.strerror or type(error).__name__).lower()}")
    return None


def _denied(error: BaseException, code: int | None, key: str, place: str) -> DeniedError:
    if code is not None:
        return DeniedError(
            f"{place}: {os.strerror(code).lower()}", key=key, hint="check the owner and the mode of this path"
        )
    hint = "check the credentials and their permissions: [storage] in ckptguard.toml, or fsspec's configuration"
    if "HostKeyNotVerifiable" in {type(each).__name__ for each in _chain(error)}:
        hint = "add the host's key to ~/.ssh/known_hosts"
    reason = _said(error) if str(error) else "no permission"
    return DeniedError(f"{place}: {reason}", key=key, hint=hint)


def _said(error: BaseException) -> str:
    """Return what a store answered, or the class and the text of a foreign error, without secrets, on one line."""
    name, text = _answered(error)
    text = redacted(" ".join((text or str(error)).split()))[:500]
    if name:
        return escape(f"the store refuses: {text.rstrip('.')} ({name})" if text else f"the store refuses ({name})")
    return escape(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, a few levels deep."""
    found, current = [error], error.__cause__
    while current is not None and len(found) < 5:
        found.append(current)
        current = current.__cause__
    return found


def _answered(error: BaseException) -> tuple[str, str]:
    """Return the code and the message of an answer of S3. Without a body the code is the status. Else both are ""."""
    for each in _chain(error):
        response = getattr(each, "response", None)
        if isinstance(response, dict) and isinstance(found := response.get("Error"), dict):
            return str(found.get("Code") or ""), str(found.get("Message") or "")
    return "", ""


def is_refused_without_reason(error: BaseException) -> bool:
    """True for a refusal of S3 that may have a reason, which the answer to a HEAD cannot say."""
    return _answered(error)[0] in ("301", "400", "403")


def is_condition_failed(error: BaseException) -> bool:
    """True if a store refused a request because the object is not the one that the request names, or too short for
    it."""
    return _status(error) in (412, 416)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of a store's answer, if its library reports it."""
    for each in _chain(error):
        response = getattr(each, "response", None)
        if isinstance(response, dict):  # botocore
            number = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            reported = (getattr(each, name, None) for name in ("status_code", "status", "code"))
            number = next((value for value in reported if value is not None), None)
        if isinstance(number, str) and number.isdigit():  # gcsfs
            number = int(number)
        if isinstance(number, int) and 400 <= number < 600:
            return number
    return None
