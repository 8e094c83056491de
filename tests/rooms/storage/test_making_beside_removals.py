"""What is made in records beside a process that removes them. Every interleaving is in `tests/campaigns`."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tiny_run import TINY, inline, opened, save
from support.views import look

from ckptguard.errors import RunRemovedError
from ckptguard.runs.work import Work
from ckptguard.storage.local import removal
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.upkeep.reconcile import PassNotes, reconcile


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """How long was waited for others, each time; nobody waits really."""
    found: list[float] = []
    clock = SimpleNamespace(time=time.time, monotonic=lambda: sum(found), sleep=found.append)
    monkeypatch.setattr(removal, "time", clock)
    return found


def made(run: Path) -> LocalStorage:
    """The records of a run after a pass."""
    for step in (100, 200):
        save(str(run), step, step)
    reconcile(look(opened(str(run)), TINY), PassNotes(), work=Work(scanner=inline), assume_quiet=True)
    return LocalStorage(str(run / "_ckptguard"))


def test_a_pass_waits_for_nobody_where_nobody_else_writes(tmp_path, waits):
    """What it makes itself is no sign of a removal."""
    removal.time.time = lambda: time.time() + sum(waits)
    made(tmp_path / "run")
    assert len(waits) <= 1  # the records' folder itself was made a moment ago


@pytest.mark.parametrize("key", ["new.json", "kept/new.json", "kept/model-#/new.json"])
def test_nothing_is_made_above_a_folder_in_which_somebody_removes(tmp_path, monkeypatch, waits, key):
    """However deep below the removal is: it has read the names above, too."""
    records = made(tmp_path / "run")
    below = sorted(path for path in (tmp_path / "run" / "_ckptguard" / "kept").rglob("*") if path.is_file())
    deep = [path for path in below if path.name.startswith("held.config")]
    assert len(deep) == 2
    real = removal._seen

    def removing(chain):
        if deep:
            deep.pop().unlink()
        elif waits:
            (tmp_path / "run" / "_ckptguard" / "format.json").unlink(missing_ok=True)
        return real(chain)

    monkeypatch.setattr(removal, "_seen", removing)
    monkeypatch.setattr(removal, "_LONGEST", 3600.0)
    with pytest.raises(RunRemovedError):
        records.create(key, b"{}")
    assert waits
    assert not list((tmp_path / "run").rglob("*new.json*"))
