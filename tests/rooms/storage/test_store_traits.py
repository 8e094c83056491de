"""What is known of a kind of store stands in one table, and nothing else asks for a protocol's name."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

import ckptguard
from ckptguard.storage import normalise_url
from ckptguard.storage.traits import _STORES, LOCAL, UNKNOWN, traits_of, traits_of_url

ROOT = Path(ckptguard.__file__).parent
NAMES = {name for store in _STORES for name in store.names} | set(LOCAL)


def is_a_name(text: object, path: Path) -> bool:
    """Whether a string of the source stands for a protocol. Memory and local are words as well, outside of storage."""
    names = NAMES if path.is_relative_to(ROOT / "storage") else NAMES - {"memory", "file", "local"}
    return isinstance(text, str) and (text in names or (text.partition("://")[0] in names and "://" in text))


def texts(path: Path) -> list[tuple[int, str]]:
    """Every string of a source file but docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    spoken = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in spoken]
    return [(node.lineno, node.value) for node in found if isinstance(node.value, str)]


def test_names_of_protocols_stand_in_the_table_alone() -> None:
    """No other file of ours has one as a string: a new store is a new row."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "storage" / "traits.py"
        for line, text in texts(path)
        if is_a_name(text, path) and text != "file"  # that is also the kind of an entry
    ]
    assert wrong == []


def test_every_protocol_has_one_row() -> None:
    """No name stands in two rows."""
    assert len(NAMES) == sum(len(store.names) for store in _STORES) + len(LOCAL)


@pytest.mark.parametrize(
    ("package", "name", "url"),
    [
        ("s3fs", "S3FileSystem", "s3://bucket/run"),
        ("gcsfs", "GCSFileSystem", "gs://bucket/run"),
        ("adlfs", "AzureBlobFileSystem", "abfs://container/run"),
        ("fsspec.implementations.memory", "MemoryFileSystem", "memory://run"),
    ],
)
def test_a_url_and_what_opens_it_have_the_same_traits(package: str, name: str, url: str) -> None:
    """By whichever of its names a file system is opened, it is the same kind of store."""
    opened = getattr(pytest.importorskip(package), name)
    assert traits_of(opened) is traits_of_url(url) is not UNKNOWN
    names = (opened.protocol,) if isinstance(opened.protocol, str) else opened.protocol
    assert {traits_of_url(f"{each}://x") for each in names} == {traits_of(opened)}


def test_what_is_unknown_is_taken_with_care() -> None:
    """A protocol without a row can do nothing special; a chain of file systems is one."""
    for unknown in (traits_of_url("nosuch://x"), traits_of(SimpleNamespace(protocol=("nosuch", "other")))):
        assert unknown is UNKNOWN
    assert traits_of_url("simplecache::s3://bucket/run") is UNKNOWN
    assert normalise_url("memory::file:///x/") == "memory::file:///x"
    assert UNKNOWN.holds("any name?\\")
    assert not traits_of_url("az://x").holds("what?")
