"""What is published in the records gets its name, whatever other processes make in the folders above meanwhile."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from support.records_on_disk import at

from ckptguard.records.run import Run, begin_run
from ckptguard.storage.local import removal
from ckptguard.storage.local.local_storage import LocalStorage

KEY = "manifests/step-#/000000000001.1.json"
DATA = os.urandom(5_000_000)  # more than one block


def created(run: Run) -> None:
    run.records.create(KEY, DATA)


def uploaded(run: Run) -> None:
    with run.records.upload(KEY) as upload:
        upload.write(DATA)
        upload.commit()


def copied(run: Run) -> None:
    run.storage.create("net-1.bin", DATA)
    run.storage.copy("net-1.bin", f"_ckptguard/{KEY}")


@pytest.mark.parametrize("publish", [created, uploaded, copied])
@pytest.mark.parametrize("others", [0, 1, 2, 5, 30])
def test_what_others_make_above_costs_no_file(
    publish: Any, others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make folders while the first ones of the links are made: it has its name, its bytes and its mode, nothing
    else is left, and no descriptor stays open."""
    monkeypatch.setattr(removal, "_LONGEST", 0.0)  # others do not stop
    run, honest, left = begin_run(str(tmp_path)), os.link, [others]
    run.records.create("manifests/step-#/000000000000.1.json", b"{}")
    before = len(os.listdir("/proc/self/fd"))

    def link(*given: Any, **named: Any) -> None:
        honest(*given, **named)
        if left[0] > 0:
            left[0] -= 1
            (tmp_path / "_ckptguard" / "manifests" / f"other-{left[0]}").mkdir()

    monkeypatch.setattr(os, "link", link)
    publish(run)
    with run.records.open(KEY) as reader:
        assert reader.read(0, len(DATA)) == DATA
    found = at(str(tmp_path), f"_ckptguard/{KEY}")
    assert found.stat().st_mode & 0o777 == 0o666 & ~umask()
    assert len(list(found.parent.iterdir())) == 2
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, None])
def test_what_replaces_a_file_is_as_private_as_it(mode: int | None, tmp_path: Path) -> None:
    """A link (None) has no mode of its own: what replaces it is as private as any new file, and its target stays."""
    storage, target = LocalStorage(str(tmp_path)), tmp_path / "target"
    target.write_bytes(b"old")
    (tmp_path / "last").symlink_to("target") if mode is None else (tmp_path / "last").touch(mode)
    if mode is not None:
        (tmp_path / "last").chmod(mode)
    with storage.upload("last", replace=True) as upload:
        upload.write(b"new")
        upload.commit()
    found = (tmp_path / "last").lstat()
    assert (stat.S_ISREG(found.st_mode), stat.S_IMODE(found.st_mode)) == (True, mode or 0o666 & ~umask())
    assert ((tmp_path / "last").read_bytes(), target.read_bytes()) == (b"new", b"old")


def umask() -> int:
    """The mask of new files."""
    os.umask(mask := os.umask(0o022))
    return mask
