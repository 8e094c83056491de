"""The answers of the FAQ about space are what is measured."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO
from unittest import mock

import pytest
from support.tiny_files import CONFIG, WEIGHTS, safetensors_head
from support.tiny_run import cycle, name_of

from ckptguard.inspect.list_states import survey
from ckptguard.records.run import open_run
from ckptguard.runs.run_view import RunView
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
    data = file_of(number)
    (place / WEIGHTS).write_bytes(data)
    (place / CONFIG).write_text("{}")
    return len(data)


def used(run: Path) -> int:
    """The bytes below a run's records that no file of the trainer shares."""
    found = {path.stat().st_ino: path.stat().st_size for path in (run / "_ckptguard").rglob("*") if path.is_file()}
    own = {path.stat().st_ino for path in run.rglob("*.safetensors") if "_ckptguard" not in path.parts}
    return sum(size for inode, size in found.items() if inode not in own)


def file_of(number: int) -> bytes:
    """A file of a quarter of a megabyte, of other numbers each time."""
    return safetensors_head({"a": SHAPE}) + bytes([number]) * (4 * SHAPE[0] * SHAPE[1])


HELD: list[IO[bytes]] = []  # replaced files: the inode of a deleted one may be used again, as if it was written over


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    """Close what was held."""
    yield
    while HELD:
        HELD.pop().close()


def write(path: Path, number: int, *, replace: bool = False) -> None:
    """Write into a file of this name, whatever is there, or replace it by a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name("tmp-save") if replace else path
    if replace and path.exists():
        HELD.append(path.open("rb"))
    temporary.write_bytes(file_of(number))
    temporary.replace(path)


def numbered(run: Path, number: int, *, stay: int | None, files: Sequence[str], pattern: str) -> None:
    """A new name each time, of which so many stay."""
    for file in files:
        write(run / pattern.format(number) / file if "{}" not in file else run / file.format(number), number)
    for old in range(1, number - (stay or number) + 1):
        for file in files:
            (run / pattern.format(old) / file if "{}" not in file else run / file.format(old)).unlink(missing_ok=True)


def fixed(run: Path, number: int, *, files: Sequence[str], replace: bool) -> None:
    """One name for all saves."""
    for file in files:
        write(run / file, number, replace=replace)


def last_and_best(run: Path, number: int) -> None:
    """Two fixed names: each save is the last, each third is the best, too."""
    write(run / "last.safetensors", number)
    if number % 3 == 1:
        write(run / "best.safetensors", number)


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILE, FOLDER = ("model-{}.safetensors",), (WEIGHTS,)
STEP = "model-{}"
TRAINERS: dict[str, Callable[[Path, int], None]] = {
    "a new file, all stay": partial(numbered, stay=None, files=FILE, pattern=STEP),
    "a new file, one stays": partial(numbered, stay=1, files=FILE, pattern=STEP),
    "a new folder, all stay": partial(numbered, stay=None, files=FOLDER, pattern=STEP),
    "a new folder, one stays": partial(numbered, stay=1, files=FOLDER, pattern=STEP),
    "a new folder, three stay": partial(numbered, stay=3, files=FOLDER, pattern=STEP),
    "two files of one save, all stay": partial(
        numbered, stay=None, files=("G_{}.safetensors", "D_{}.safetensors"), pattern=STEP
    ),
    "one file, written over": partial(fixed, files=("last.safetensors",), replace=False),
    "one file, replaced by a new one": partial(fixed, files=("last.safetensors",), replace=True),
    "one folder, its files written over": partial(fixed, files=("last/" + WEIGHTS,), replace=False),
    "last, and at times best, written over": last_and_best,
}


def told_of_trainers() -> dict[str, tuple[int, int]]:
    """The other table: how a trainer saves, and the copies at the end of a pass and at most."""
    rows = re.findall(r"^\| ([a-z][^|`]*) \| (\d) \| (\d) \|$", FAQ.read_text(encoding="utf-8"), re.MULTILINE)
    return {words: (int(after), int(most)) for words, after, most in rows}


def test_the_faq_tells_of_all_of_these_trainers() -> None:
    """In the same order."""
    assert list(told_of_trainers()) == list(TRAINERS)


@contextlib.contextmanager
def measured_at_each_copy(folder: Path, runs: str) -> Iterator[list[int]]:
    """Yield the bytes of copies in the run that has most, after each copy. There are no reflinks meanwhile."""
    uses = [0]

    def watched(storage: LocalStorage, *given: object, **more: object) -> object:
        try:
            return _copy(storage, *given, **more)  # type: ignore[arg-type]
        finally:
            uses.append(max(map(used, folder.glob(runs))))

    with (
        mock.patch.object(local_storage, "clone_into", return_value=False),
        mock.patch.object(LocalStorage, "copy", watched),
    ):
        yield uses


@pytest.mark.parametrize("words", TRAINERS)
def test_the_copies_of_each_kind_of_trainer_take_what_the_faq_says(tmp_path: Path, words: str) -> None:
    """In whole copies of a save, with the settings as they are, without reflinks. `list` says the same as the disk."""
    settings, after, run = Settings(settle=0.0), 0, tmp_path / "run"
    with measured_at_each_copy(tmp_path, "run*") as uses:
        for number in range(1, 10):
            TRAINERS[words](run, number)
            cycle(open_run(str(run), settings), settings)
            after = max(after, used(run))
            listed = sum(state.kept_bytes or 0 for state in survey(RunView(open_run(str(run), settings), settings)))
            assert abs(listed - used(run)) < 0.2 * len(file_of(1))
    size = len(file_of(1)) * (2 if words.startswith("two files") else 1)
    assert told_of_trainers()[words] == (round(after / size), round(max(uses) / size))


@pytest.mark.parametrize("keep", ["auto", "copy", "link", "none"])
def test_the_copies_take_what_the_faq_says(tmp_path: Path, keep: str) -> None:
    """In whole copies of a checkpoint, on a file system without reflinks: at the end of each pass, and at the moment
    when they are most. The records beside them are small."""
    settings, measured = Settings(settle=0.0, keep=keep), []
    with measured_at_each_copy(tmp_path, "run*") as uses:
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
    assert told()[keep] == tuple(round(copies) for copies in (*measured, max(uses) / size))
    assert all(abs(copies - round(copies)) < 0.2 for copies in measured)
