"""Distributed checkpoints whose files are of two saves, each of them whole: never good without a word."""

from __future__ import annotations

import itertools
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.runs import QUICK

from ckptguard.runs.results import Checked
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import verify_target

PIECES = 3


def save(folder: Path, seed: int) -> list[str]:
    """Matrices of one shape with their moments, in several files; the names of those."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"w{i}" for i in range(6)]
    state = {
        "model": {name: torch.randn(8, 8, generator=generator) for name in names},
        "optimizer": {"state": {name: {"exp_avg": torch.randn(8, 8, generator=generator)} for name in names}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=PIECES), no_dist=True)
    return sorted(path.name for path in folder.glob("*.distcp"))


def told(target: Path) -> tuple[Checked, set[Severity]]:
    """The verdict on the newest checkpoint, and how heavy it is that its files may be of two saves."""
    checked = verify_target(str(target), QUICK).checkpoints[-1]
    return checked, {
        f.severity for f in checked.findings if "different saves" in f.message or "to that save" in f.message
    }


@pytest.mark.parametrize("what", [".metadata", *(f"__0_{n}.distcp" for n in range(PIECES))])
def test_a_file_of_another_save(tmp_path: Path, what: str) -> None:
    """The loader takes it as it is. At first sight it is said that nothing binds the files; where the other save is on
    record, which file it is."""
    assert f"__0_{PIECES - 1}.distcp" in save(tmp_path / "run" / "step_1", 1)
    save(tmp_path / "run" / "step_2", 2)
    assert told(tmp_path / "run" / "step_1")[1] == {Severity.NOTICE}
    shutil.copytree(tmp_path / "run", tmp_path / "stray")
    shutil.copyfile(tmp_path / "stray" / "step_1" / what, tmp_path / "stray" / "step_2" / what)
    checked, heavy = told(tmp_path / "stray" / "step_2")
    assert checked.outcome is not Outcome.GOOD or heavy == {Severity.NOTICE}
    shutil.move(tmp_path / "run" / "step_2", tmp_path / "step_2")
    assert told(tmp_path / "run")[0].outcome is Outcome.GOOD
    shutil.copytree(tmp_path / "stray" / "step_2", tmp_path / "run" / "step_2")
    checked, heavy = told(tmp_path / "run")
    if what != ".metadata":
        assert checked.outcome is not Outcome.GOOD or heavy == {Severity.NOTICE, Severity.WARNING}, checked.findings


@pytest.mark.parametrize("pair", [*itertools.combinations(range(PIECES), 2)])
def test_two_files_swapped(tmp_path: Path, pair: tuple[int, int]) -> None:
    """Of equal shapes they load under each other's names."""
    folder = tmp_path / "step_1"
    save(folder, 1)
    one, other = (folder / f"__0_{n}.distcp" for n in pair)
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    checked, heavy = told(folder)
    assert checked.outcome is not Outcome.GOOD or heavy == {Severity.NOTICE}
