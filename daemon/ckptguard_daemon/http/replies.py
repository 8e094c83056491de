"""Answers in JSON, also large ones, refusals with a sentence, and what a request says: its body and its numbers."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ckptguard.documents.build import Document
from ckptguard.errors import (
    BusyError,
    CkptguardError,
    CouldNotTellError,
    NoKnownGoodError,
    NotFoundError,
    ObjectExistsError,
    PlanChangedError,
    RecordsError,
    RefusedError,
    SettingsError,
)
from ckptguard.values.ids import escape
from ckptguard.values.record_text import encoded, what_is_wrong
from ckptguard_daemon.log import log

LARGEST_BODY = 64 * 1024
BODY_SECONDS = 10.0
_DEEPEST = 32  # levels of tables and lists in a body
_WORTH_PACKING = 4096  # bytes

_STATUS: dict[int, tuple[type[CkptguardError], ...]] = {
    400: (SettingsError,),
    404: (NotFoundError, NoKnownGoodError),
    423: (BusyError,),
    409: (RefusedError, ObjectExistsError, PlanChangedError),
    503: (CouldNotTellError, RecordsError),
}

_Body = TypeVar("_Body", bound=msgspec.Struct)


def reply(document: Document, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a document as the answer."""
    return Response(msgspec.json.encode(document) + b"\n", status, headers, "application/json")


def pack(request: Request, document: Document) -> Response:
    """Return a large document as the answer: packed if the client can unpack it, and always valid JSON. It may take a
    while, so call it outside the event loop."""
    text, headers = encoded(document) + b"\n", {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if len(text) >= _WORTH_PACKING and "gzip" in request.headers.get("accept-encoding", ""):
        text = gzip.compress(text, compresslevel=1)
        headers["Content-Encoding"] = "gzip"
    return Response(text, headers=headers, media_type="application/json")


def escaped(value: Any) -> Any:
    """Return a document whose texts are safe to show: control and right-to-left characters are escaped."""
    if isinstance(value, dict):
        return {escape(k): escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [escaped(v) for v in value]
    return escape(value) if isinstance(value, str) else value


def refusal(
    kind: str, message: str, status: int, hint: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer that says why not."""
    return reply({"error": {"kind": kind, "message": message, "hint": hint}}, status, headers)


def unauthorized(message: str, hint: str | None = None) -> Response:
    """Return the refusal of who has no right token."""
    return refusal("unauthorized", message, 401, hint, {"WWW-Authenticate": "Bearer"})


def number(request: Request, name: str, kind: Callable[[str], Any], most: float) -> Any:
    """Return a number of the query, or None. Raises SettingsError unless it is from 0 to `most`."""
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = kind(text[:40])
    except ValueError:
        value = None
    if value is None or not 0 <= value <= most:
        raise SettingsError(f"`{name}` must be a number, 0 or more")
    return value


async def read_body(request: Request, kind: type[_Body], empty: _Body | None = None) -> _Body:
    """Read the request's JSON body, with limited size and time. `empty` stands for no body."""
    data = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for block in request.stream():
                data += block
                if len(data) > LARGEST_BODY:
                    raise HTTPException(413, f"the body is longer than {LARGEST_BODY} bytes")
    except TimeoutError:
        raise HTTPException(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body ended early") from None
    if not data and empty is not None:
        return empty
    try:
        body = msgspec.json.decode(data, type=kind)
        if _is_deep(msgspec.structs.asdict(body)):
            raise RecursionError
    except RecursionError:
        raise SettingsError(f"the body is nested deeper than {_DEEPEST} levels") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise SettingsError(f"the body does not have the expected form: {what_is_wrong(error)}") from error
    return body


def _is_deep(value: Any) -> bool:
    """True if tables and lists are nested too deep for some JSON readers."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        inner = (v.values() if isinstance(v, dict) else v if isinstance(v, list) else () for v in level)
        level = [v for values in inner for v in values]
    return bool(level)


async def _refuse_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CkptguardError)
    status = next((status for status, kinds in _STATUS.items() if isinstance(error, kinds)), 500)
    return refusal(error.kind, error.message, status, error.hint)


async def _refuse_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kinds = {404: "not_found", 405: "method", 408: "timeout", 413: "too_large"}
    # The rest of a body is not waited for.
    headers = {"Connection": "close"} if error.status_code in (408, 413) else None
    return refusal(kinds.get(error.status_code, "request"), error.detail, error.status_code, None, headers)


async def _refuse_mistake(request: Request, error: Exception) -> Response:
    log("answer_failed", level="error", path=request.url.path, reason=f"{type(error).__name__}: {error}")
    return refusal("error", f"unexpected {type(error).__name__}", 500)


REFUSALS: Any = {CkptguardError: _refuse_error, HTTPException: _refuse_http_error, Exception: _refuse_mistake}
