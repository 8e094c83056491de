"""What is wrong with the TLS of a Dask scheduler, or with ours: which file, or which side refuses the other."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from ckptguard.errors import SettingsError
from ckptguard.values.ids import escape

_TIMEOUT = 5.0  # seconds
_HINT = "see distributed.comm.tls in the configuration of Dask"


def context_of(tls: Mapping[str, Any]) -> ssl.SSLContext | None:
    """Return what `distributed.comm.tls` of Dask says for a client, or None if it has no certificate.

    Raises SettingsError that names the file which is missing, unreadable or of no use.
    """
    ca, own = tls.get("ca-file"), tls.get("client") or {}
    cert, key = own.get("cert"), own.get("key")
    if not cert:
        return None
    if not ca:
        raise SettingsError("Dask has a certificate for TLS and no ca-file", hint=_HINT)
    context = _context()
    _certificates(context, ca, "the CA file")
    _certificates(_context(), cert, "the certificate")
    if "\n" in cert or "\n" in (key or ""):
        return context  # Dask takes the text itself, too
    if key:
        _read(key, "the key")
    try:
        context.load_cert_chain(cert, key, password="")  # none is asked for on the terminal
    except (ssl.SSLError, ValueError) as error:
        mismatch = isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
        reason = "is not that of" if mismatch else "cannot be used, or has a password, with"
        raise SettingsError(
            f"the key {escape(key or cert)} {reason} the certificate {escape(cert)}", hint=_HINT
        ) from error
    return context


def why_not(host: str, port: int, context: ssl.SSLContext | None) -> str:
    """Connect to a scheduler that Dask could not use, and say why not."""
    asked = context or _context()
    asked.verify_mode = ssl.CERT_NONE if context is None else ssl.CERT_REQUIRED
    try:
        with (
            socket.create_connection((host.strip("[]"), port), _TIMEOUT) as plain,
            asked.wrap_socket(plain) as secure,
            contextlib.suppress(TimeoutError),
        ):
            secure.recv(1)  # a certificate that is refused is first said here
    except ssl.SSLCertVerificationError as error:
        return f"has a certificate that our CA file does not accept: {error.verify_message}"
    except ssl.SSLError as error:
        reason = (error.reason or "").lower().replace("_", " ")
        if "alert" in reason and context is not None:
            return f"refuses our certificate: {reason.partition('alert ')[2]}"
        if "alert" not in reason:
            return "does not speak TLS" if context is not None else "cannot be reached"
    except OSError as error:
        return f"cannot be reached: {error.strerror or error}"
    return "cannot be reached" if context is not None else "speaks TLS, and Dask has no certificate here"


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # as Dask does: the CA is the cluster's own
    return context


def _certificates(context: ssl.SSLContext, place: str, what: str) -> None:
    """Load certificates from a file, or from their text."""
    try:
        context.load_verify_locations(cadata=place if "\n" in place else _read(place, what))
    except (ssl.SSLError, ValueError) as error:
        raise SettingsError(f"{what} {escape(place[:200])} holds no certificate", hint=_HINT) from error


def _read(place: str, what: str) -> str:
    try:
        with open(place, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"{what} {escape(place)} cannot be read: {reason}", hint=_HINT) from error
