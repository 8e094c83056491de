"""The answers of the FAQ about space are what is measured."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
from support.tiny_files import CONFIG, WEIGHTS, safetensors_head
from support.tiny_run import cycle, name_of

from ckptguard.records.run import open_run
from ckptguard.storage.local import local_storage
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.values.settings import Settings

FAQ = Path(__file__).resolve().parents[3] / "docs" / "faq.md"
SHAPE = (256, 256)
_copy = LocalStorage.copy


def told() -> dict[str, tuple[int, int, int]]:
    """The table of the FAQ: for each `keep` the copies that are full if all saves stay, if one stays, and at most."""
    text = FAQ.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (\d) \| (\d) \| (\d) \|$", text, re.MULTILINE)
    return {keep: (int(all_stay), int(one_stays), int(most)) for keep, all_stay, one_stays, most in rows}


def save(run: Path, number: int) -> int:
    """A checkpoint of a quarter of a megabyte, of other numbers each time. Return its size."""
    place = run / name_of(number)
    place.mkdir(parents=True)
    data = safetensors_head({"a": SHAPE}) + bytes([number]) * (4 * SHAPE[0] * SHAPE[1])
    (place / WEIGHTS).write_bytes(data)
    (place / CONFIG).write_text("{}")
    return len(data)


def used(run: Path) -> int:
    """The bytes below a run's records that no file of the trainer shares."""
    found = {path.stat().st_ino: path.stat().st_size for path in (run / "_ckptguard").rglob("*") if path.is_file()}
    own = {path.stat().st_ino for path in run.glob("model-*/*")}
    return sum(size for inode, size in found.items() if inode not in own)


@pytest.mark.parametrize("keep", ["auto", "copy", "link", "none"])
def test_the_copies_take_what_the_faq_says(tmp_path: Path, keep: str) -> None:
    """In whole copies of a checkpoint, on a file system without reflinks: at the end of each pass, and at the moment
    when they are most. The records beside them are small."""
    settings, measured, most = Settings(settle=0.0, keep=keep), [], 0

    def watched(storage: LocalStorage, *given: object, **more: object) -> object:
        nonlocal most
        try:
            return _copy(storage, *given, **more)  # type: ignore[arg-type]
        finally:
            most = max(most, used(run))

    patches = (
        mock.patch.object(local_storage, "clone_into", return_value=False),
        mock.patch.object(LocalStorage, "copy", watched),
    )
    with patches[0], patches[1]:
        for stays in (None, 1):
            run, size, ours = tmp_path / f"run-{stays}", 1, 0
            for number in range(1, 8):
                size = save(run, number)
                for old in range(1, number if stays else 0):
                    for path in (run / name_of(old)).glob("*"):
                        path.unlink()
                cycle(open_run(str(run), settings), settings)
                ours = max(ours, used(run))
            measured.append(ours / size)
    assert told()[keep] == tuple(round(copies) for copies in (*measured, most / size))
    assert all(abs(copies - round(copies)) < 0.2 for copies in measured)
