"""On a file system with reflinks, copies cost nothing: a real XFS, and a real Btrfs where its tools are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click.testing
import pytest
from support.tiny_files import CONFIG, WEIGHTS, safetensors_head
from support.tiny_run import cycle, name_of
from support.views import look

from ckptguard.cli.entry import commands
from ckptguard.keep.room import own_bytes
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.run import Run, open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.storage.local.shared_extents import unshared_bytes
from ckptguard.values.settings import Settings

MAKERS = {"xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"], "btrfs": ["mkfs.btrfs", "-q"]}
NUMBERS = 1 << 20  # four bytes each
SETTINGS = Settings(settle=0.0, copy_every=1e6)


@pytest.fixture(scope="module", params=sorted(MAKERS))
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty file system of this kind, in a file."""
    maker = MAKERS[request.param]
    if shutil.which(maker[0]) is None:
        pytest.skip(f"{maker[0]} is not installed")
    base = tmp_path_factory.mktemp(request.param)
    image, place = base / "image", base / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run([*maker, str(image)], check=True, capture_output=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def root(disk: Path) -> Iterator[Path]:
    """A run's folder on it."""
    place = disk / "run"
    place.mkdir()
    yield place
    shutil.rmtree(place)


def save(run: Path, name: str, number: int) -> None:
    """A checkpoint of four megabytes that nothing can compress away, written into files that may be there."""
    (run / name).mkdir(exist_ok=True)
    data = bytes([number]) + os.urandom(4 * NUMBERS - 1)
    data = bytes(byte & 0x3F for byte in data[:4096]) * (4 * NUMBERS // 4096)  # finite numbers
    (run / name / WEIGHTS).write_bytes(safetensors_head({"a": (NUMBERS,)}) + data)
    (run / name / CONFIG).write_text("{}")


def used(disk: Path) -> int:
    """The bytes that the disk has given away."""
    os.sync()
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def hows(run: Run) -> set[str]:
    """How the kept copies were made."""
    return {copy.how for id in list_kept(run) if (copy := read_kept(run, id)) is not None}


def costs(run: Run) -> dict[str, int | None]:
    """What each kept copy occupies alone."""
    return {copy.path: own_bytes(run, copy) for id in list_kept(run) if (copy := read_kept(run, id)) is not None}


@pytest.mark.parametrize("keep", ["auto", "link"])
def test_copies_take_no_space_while_the_saves_are_there(disk: Path, root: Path, keep: str) -> None:
    """Six saves stay, two are kept. The disk gives away what the saves take, and the listing says the same."""
    before, settings = used(disk), SETTINGS.changed(keep=keep)
    for number in range(1, 7):
        save(root, name_of(number), number)
        cycle(open_run(str(root)), settings)
    run = open_run(str(root))
    assert hows(run) == {"reflink"}
    assert used(disk) - before < 6.5 * 4 * NUMBERS
    assert all(cost is not None and cost <= 4096 for cost in costs(run).values())  # Btrfs shares no tiny files


def test_a_copy_costs_what_it_saved(disk: Path, root: Path) -> None:
    """The trainer deletes a save, or writes over it in place: now the copy occupies its bytes, the listing says so, and
    they are the old ones."""
    for number in (1, 2):
        save(root, name_of(number), number)
        cycle(open_run(str(root)), SETTINGS)
    old = {number: (root / name_of(number) / WEIGHTS).read_bytes() for number in (1, 2)}
    os.truncate(root / name_of(1) / WEIGHTS, 0)  # XFS frees a deleted file later, and a truncated one at once
    shutil.rmtree(root / name_of(1))
    save(root, name_of(2), 9)
    os.sync()
    run = open_run(str(root))
    for number in (1, 2):
        cost = costs(run)[name_of(number)]
        assert cost is not None
        assert 4 * NUMBERS <= cost < 4.2 * NUMBERS
    for id in list_kept(run):
        copy = read_kept(run, id)
        assert copy is not None
        path = Path(run.records.path_of(copy.key(f"{copy.path}/{WEIGHTS}")))
        assert path.read_bytes() == old[int(copy.path.removeprefix("model-"))]
    shown = click.testing.CliRunner().invoke(commands, ["list", str(root), "--json"], prog_name="ckptguard")
    listed = {one["path"]: one for one in json.loads(shown.output)["checkpoints"]}
    assert {path: one["kept_bytes"] for path, one in listed.items() if one["kept_how"]} == costs(run)


def test_a_name_that_is_written_over_costs_its_last_copies(disk: Path, root: Path) -> None:
    """`torch.save` into one file, six times. The newest good one has a copy whatever is written over it next."""
    before = used(disk)
    for number in range(1, 7):
        save(root, "last", number)
        cycle(open_run(str(root)), SETTINGS)
    run = open_run(str(root))
    assert hows(run) == {"reflink"}
    assert used(disk) - before < 3.5 * 4 * NUMBERS
    good = (root / "last" / WEIGHTS).read_bytes()
    (root / "last" / WEIGHTS).write_bytes(b"cut")
    found = find_known_good(run)
    assert Path(found.path, WEIGHTS).read_bytes() == good
    assert look(run).history.is_good(found.id)


def test_doctor_says_that_copies_are_free(root: Path) -> None:
    """It tries it, whatever the file system is called."""
    shown = click.testing.CliRunner().invoke(commands, ["doctor", str(root), "--json"], prog_name="ckptguard")
    (reflinks,) = (one for one in json.loads(shown.output)["probes"] if one["name"] == "reflinks")
    assert reflinks["answer"] == "yes"


def test_what_is_shared_in_part_counts_in_part(disk: Path) -> None:
    """A clone of which a quarter was written again, and one that was written whole."""
    one, two = disk / "one", disk / "two"
    one.write_bytes(os.urandom(NUMBERS))
    subprocess.run(["cp", "--reflink=always", str(one), str(two)], check=True)
    assert (unshared_bytes(str(one)), unshared_bytes(str(two))) == (0, 0)
    with two.open("r+b") as file:
        file.write(os.urandom(NUMBERS // 4))
    os.sync()
    assert unshared_bytes(str(two)) == NUMBERS // 4
    assert unshared_bytes(str(one)) in (0, NUMBERS // 4)  # Btrfs frees no part of what is shared
    os.truncate(one, 0)  # XFS frees a deleted file later, and a truncated one at once
    one.unlink()
    assert unshared_bytes(str(two)) == NUMBERS
    assert unshared_bytes(str(one)) is None
    two.unlink()
