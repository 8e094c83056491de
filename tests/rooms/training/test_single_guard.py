"""Two guards that train into one run: the second one hears of it, and a crash blocks nobody."""

import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from support.guards import guarded

from ckptguard.errors import SettingsError
from ckptguard.records.leases import TrainingRecord, begin_training
from ckptguard.records.run import open_run
from ckptguard.records.who_and_when import Owner, this_process

RECORD = "_ckptguard/trainings/held.step-#.json.held"


def train(run: Path, total: int = 1) -> int:
    """A whole training."""
    guard = guarded(run, torch.nn.Linear(2, 2))
    for _ in guard.steps([1.0], total=total, save_every=1):
        guard.observe(loss=1.0)
    return guard.step


def written(run: Path, owner: Owner, *, loops: bool = True) -> None:
    """The record of another process."""
    record = TrainingRecord(series="step-#", token="0" * 32, owner=owner, loops=loops, since="2026-01-01T00:00:00Z")
    (run / RECORD).parent.mkdir(parents=True, exist_ok=True)
    (run / RECORD).write_bytes(msgspec.json.encode(record))


@pytest.fixture
def other():
    """The owner that another live process of this machine is."""
    code = (
        "import json, sys, msgspec; from ckptguard.records.who_and_when import this_process;"
        "print(msgspec.json.encode(this_process()).decode(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield msgspec.json.decode(process.stdout.readline(), type=Owner), process


def test_training_beside_another_process_is_refused_until_that_ends(tmp_path: Path, other, caplog) -> None:
    """By its number and with a way out. When it is gone, however that came, training begins."""
    owner, process = other
    written(tmp_path, owner)
    with pytest.raises(SettingsError, match=f"process {owner.pid} is already training") as refused:
        train(tmp_path)
    assert "init_process_group" in (refused.value.hint or "")
    with pytest.raises(SettingsError, match=f"process {owner.pid} is already training"):
        guarded(tmp_path, torch.nn.Linear(2, 2)).save(1)
    assert not list(tmp_path.glob("step-*"))
    process.kill()
    process.wait()
    with caplog.at_level(logging.WARNING):
        assert train(tmp_path) == 1
    assert caplog.messages == []
    assert not (tmp_path / RECORD).exists()


def test_somebody_who_only_saved_is_a_warning(tmp_path: Path, other, caplog) -> None:
    """A notebook that saved once and stays open may never save again."""
    written(tmp_path, other[0], loops=False)
    assert train(tmp_path) == 1
    assert [m for m in caplog.messages if f"process {other[0].pid} also saved" in m]


def test_a_second_guard_of_one_process_takes_over(tmp_path: Path, caplog) -> None:
    """A notebook that runs its cell again, while the last traceback still holds the loop before."""
    guard = guarded(tmp_path, torch.nn.Linear(2, 2))
    loop = guard.steps([1.0], total=5, save_every=1)
    next(loop)
    assert train(tmp_path, total=2) == 2
    assert [m for m in caplog.messages if "another guard of this process" in m]
    caplog.clear()
    loop.close()
    assert train(tmp_path, total=3) == 3
    assert not [m for m in caplog.messages if "guard" in m]


def test_who_cannot_be_asked_is_a_warning_once(tmp_path: Path, caplog) -> None:
    """Of another machine nobody here knows whether it lives; of an earlier start of this one, that it does not."""
    here = this_process()
    written(tmp_path, msgspec.structs.replace(here, host="elsewhere", boot_id="other"))
    assert train(tmp_path) == 1
    assert [m for m in caplog.messages if "on elsewhere may still train" in m]
    caplog.clear()
    written(tmp_path, msgspec.structs.replace(here, boot_id="before"))
    assert train(tmp_path, 2) == 2
    assert caplog.messages == []


def test_nonsense_in_its_place_is_nobody(tmp_path: Path) -> None:
    """Neither a broken record nor a failure to write one stops training."""
    (tmp_path / RECORD).parent.mkdir(parents=True)
    (tmp_path / RECORD).write_text('{"format": 1, "loops":')
    assert train(tmp_path) == 1
    (tmp_path / RECORD).parent.rmdir()
    (tmp_path / RECORD).parent.write_text("in the way")
    assert train(tmp_path, 2) == 2


def test_of_two_that_begin_at_once_one_is_told(tmp_path: Path) -> None:
    """The record is created exclusively, and who loses that sees the other."""
    run = open_run(str(tmp_path))
    mine, doubt = begin_training(run, "step-#", loops=True)
    assert doubt is None
    assert begin_training(run, "step-#", loops=True, before=mine)[1] is None
    assert begin_training(run, "other-#", loops=True)[1] is None
    assert "another guard" in (begin_training(run, "step-#", loops=False)[1] or "")
    assert (
        begin_training(run, "step-#", loops=True)[1] is None
    )  # of one that only saved nobody knows whether it is left
