"""The page's files: what is vendored is what was published, small, with its licence; nothing comes from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import ckptguard_daemon
import pytest

PAGE = Path(ckptguard_daemon.__file__).parent / "page"
VENDOR = PAGE / "vendor"
VENDORED = json.loads((VENDOR / "vendored.json").read_text())["files"]
OWN = sorted(path for kind in ("js", "css") for path in (PAGE / kind).rglob(f"*.{kind}"))
LARGEST_ALLOWED = 80_000  # bytes that the libraries may have together, compressed
MAX_LINES = 400
# What would make text of a file markup, or code.
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\(|new Function|javascript:")
ADDRESS = re.compile(r"https?://(?!www\.w3\.org/(?:2000/svg|1999/xhtml))")


@pytest.mark.parametrize("entry", VENDORED, ids=lambda entry: entry["file"])
def test_each_vendored_file_has_its_digest_and_licence(entry: dict[str, str]) -> None:
    """Each vendored file is the published one, and its licence lies beside it."""
    assert hashlib.sha256((VENDOR / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
    assert entry["version"]
    assert entry["licence"]
    assert (VENDOR / entry["licence_file"]).stat().st_size > 500


def test_no_vendored_file_is_unnamed() -> None:
    """Nothing lies among the vendored files that the list does not name."""
    named = {entry["file"] for entry in VENDORED} | {entry["licence_file"] for entry in VENDORED} | {"vendored.json"}
    assert {path.name for path in VENDOR.iterdir()} == named


def test_the_libraries_are_small_together() -> None:
    """The libraries are under 80 KB together as they travel."""
    size = sum(len(gzip.compress((VENDOR / entry["file"]).read_bytes(), 9)) for entry in VENDORED)
    assert size < LARGEST_ALLOWED


def test_every_module_of_the_import_map_exists() -> None:
    """Each address of the import map is a file."""
    found = re.search(r'<script type="importmap">(.*?)</script>', (PAGE / "index.html").read_text(), re.DOTALL)
    assert found is not None
    imports = json.loads(found[1])["imports"]
    assert imports
    for address in imports.values():
        assert (PAGE / address.removeprefix("./page/")).is_file()


def test_every_file_that_the_page_names_exists() -> None:
    """Each file that the page's head names is there."""
    named = re.findall(r'(?:href|src)="page/([^"]+)"', (PAGE / "index.html").read_text())
    assert named
    for name in named:
        assert (PAGE / name).is_file(), name


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_files_are_short_and_make_no_markup_of_text(path: Path) -> None:
    """No file of the page is long, makes markup of text, or names a foreign address."""
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert not MARKUP.search(text)
    assert not ADDRESS.search(text)


@pytest.mark.parametrize("path", [p for p in OWN if p.suffix == ".js"], ids=lambda path: path.name)
def test_every_imported_file_exists(path: Path) -> None:
    """Each import of a module of the page leads to a file."""
    for name in re.findall(r'(?:from|import)\s*\(?\s*"(\.[^"]+)"', path.read_text()):
        # Pages are loaded when they are first seen.
        assert (path.parent / name).is_file(), name
