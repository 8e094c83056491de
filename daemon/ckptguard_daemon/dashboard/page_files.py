"""The files of the dashboard's page, from memory: a path that is not one of them leads nowhere."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import re
from pathlib import Path

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ckptguard_daemon.http.routes import Route, Served

FOLDER = Path(__file__).resolve().parents[1] / "page"
_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_IMPORT_MAP = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


_MODULES = b"<!-- modules -->"


def _preloads() -> bytes:
    """Return what has a browser ask for all modules at once. One would else be found only in the one before."""
    found = [*sorted(FOLDER.glob("vendor/*.mjs")), *sorted(FOLDER.glob("js/**/*.js"))]
    names = (path.relative_to(FOLDER).as_posix() for path in found if path.name != "first.js")
    return "\n".join(f'<link rel="modulepreload" href="page/{name}">' for name in names).encode()


def _policy(index: bytes) -> str:
    """Return the content security policy. An import map must be within the page, so its digest is named."""
    maps = "".join(
        f" 'sha256-{base64.b64encode(hashlib.sha256(found).digest()).decode()}'" for found in _IMPORT_MAP.findall(index)
    )
    return (
        f"default-src 'none'; script-src 'self'{maps}; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


POLICY = _policy((FOLDER / "index.html").read_bytes())


class _File(msgspec.Struct, frozen=True):
    kind: str
    text: bytes
    packed: bytes | None
    tag: str


@functools.cache
def _files() -> dict[str, _File]:
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        kind = _KINDS.get(path.suffix)
        if kind is not None and path.is_file():
            text = path.read_bytes()
            if path.name == "index.html":
                text = text.replace(_MODULES, _preloads())
            packed = gzip.compress(text, mtime=0)
            tag = f'"{hashlib.sha256(text).hexdigest()[:32]}"'
            found[path.relative_to(FOLDER).as_posix()] = _File(
                kind, text, packed if len(packed) < len(text) and path.suffix != ".png" else None, tag
            )
    return found


async def _answer(request: Request, *, name: str | None = None) -> Response:
    file = _files().get(name or request.path_params["name"])
    if file is None:
        raise HTTPException(404, "the page has no such file")
    headers = {"ETag": file.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if file.packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, media_type=file.kind, headers={**headers, "Content-Encoding": "gzip"})
    return Response(file.text, media_type=file.kind, headers=headers)


def routes(served: Served) -> list[Route]:
    """Return the routes of the page. Its files hold nothing of any run, so everybody may read them."""
    names = {"/": "index.html", "/login": "login.html", "/favicon.ico": "icon.svg"}
    pages = [Route(path, functools.partial(_answer, name=name), None) for path, name in names.items()]
    return [*pages, Route("/page/{name:path}", _answer, None)]
