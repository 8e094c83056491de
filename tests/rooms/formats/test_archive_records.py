"""The small records of a torch archive: what torch does not open because of one is no whole file."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from support.format_files import structure_of, torch_bytes

NAMES = ("version", ".storage_alignment", ".data/serialization_id", "byteorder")
TEXTS = (b"", b"3\n", b"10", b"11", b"0", b"-1", b"big\n", b"little", b"64", b"6\xb4", b"9" * 30, b"\xff" * 40, None)


def with_record(data: bytes, name: str, text: bytes | None) -> bytes:
    """An archive with a record of its own text, or without it."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            kept = info.filename.partition("/")[2] != name
            if kept or text is not None:
                new.writestr(info.filename, old.read(info) if kept else text)
    return target.getvalue()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_what_torch_does_not_open_is_broken(name, text, tmp_path):
    """And what it opens is read, without a problem."""
    data = with_record(torch_bytes({"w": torch.ones(3)}), name, text)
    try:
        torch.load(io.BytesIO(data), weights_only=True)
        opens = True
    except (RuntimeError, ValueError, IndexError):
        opens = False
    assert (structure_of(tmp_path, "net.pt", data).problems == ()) is opens
