"""Large answers: made and packed outside the event loop, and always valid JSON, whatever a name holds."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ckptguard.documents.build import Document
from ckptguard.values.ids import escape
from ckptguard.values.record_text import encoded

_WORTH_PACKING = 4096  # bytes
_HEADERS = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}


async def answer(request: Request, make: Callable[[], Document]) -> Response:
    """Return the document that `make` returns. It is called in a thread."""
    return await run_in_threadpool(lambda: pack(request, make()))


def pack(request: Request, document: Document) -> Response:
    """Return a document as the answer: packed if the client can unpack it. It may take a while."""
    text, headers = encoded(document) + b"\n", dict(_HEADERS)
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
