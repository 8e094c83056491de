"""The file of tokens: read only if nobody else can read or change it."""

from __future__ import annotations

import os
import secrets
import stat

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.values.access import Token, digest_of, parse_tokens

_LARGEST = 2**20
_SECRET_BYTES = 32


def read_tokens(path: str) -> tuple[Token, ...]:
    """Return the tokens. Raises SettingsError, also if another user can read the file."""
    text, found = read_secret(path, "tokens", _LARGEST + 1)
    _check(path, found)
    if len(text) > _LARGEST:
        raise SettingsError(f"{path} is larger than {_LARGEST} bytes")
    try:
        return parse_tokens(text.decode())
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is no text") from None
    except SettingsError as error:
        raise SettingsError(f"{path}, {error.message}", hint=error.hint) from error


def read_secret(path: str, what: str, most: int) -> tuple[bytes, os.stat_result]:
    """Return the first `most` bytes of a file, and its status. What is no regular file has no bytes: no pipe is waited
    for. Raises SettingsError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            return file.read(most) if stat.S_ISREG(found.st_mode) else b"", found
    except OSError as error:
        raise SettingsError(f"the {what} in {path} cannot be read: {error.strerror}") from error


def _check(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SettingsError(f"{path} is no file")
    if found.st_uid not in (os.getuid(), 0):
        raise SettingsError(f"{path} belongs to another user", hint="use a file of your own")
    # A secret that Kubernetes or systemd mounts is root's, and lets the service's group read it.
    others = 0o037 if found.st_uid == 0 and os.getuid() != 0 else 0o077
    if found.st_mode & others:
        raise SettingsError(f"other users can read or change {path}", hint=f"chmod 600 {path}")


def add_token(path: str, wanted: Token) -> tuple[Token, str]:
    """Append a token with a new digest to a file, which is created if need be. Returns it, and its secret, which is
    stored nowhere. Raises SettingsError."""
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    token = msgspec.structs.replace(wanted, digest=digest_of(secret))
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "r+b", buffering=0) as file:
            known = read_tokens(path)
            if any(one.name == token.name for one in known):
                raise SettingsError(f"{path} has a token {token.name}", hint="remove its line first, or choose a name")
            size = os.fstat(descriptor).st_size
            broken = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            file.write(("\n" if broken else "").encode() + token.line.encode() + b"\n")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
    return token, secret
