"""A full disk: an error that says so, the known-good checkpoint untouched, no half-file under a final name."""

import contextlib
import os
import resource

import pytest
import torch
from support.records_on_disk import at, key_of
from support.runs import QUICK, write_torch
from support.views import look

import ckptguard
from ckptguard.errors import StorageFullError
from ckptguard.records.kept import read_kept
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.free_space import SHARED, SharedSpace
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId

COPIES = QUICK.changed(keep="copy")


@contextlib.contextmanager
def no_file_larger_than(size):
    """The kernel refuses longer files (EFBIG), as a quota would; the handling is that of ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files(folder):
    """All files below a folder with their sizes, the lock aside."""
    return {key_of(folder, p): p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


@pytest.fixture
def root(tmp_path):
    """A run with one kept checkpoint."""
    folder = tmp_path / "run"
    write_torch(folder, 100, seed=1)
    reconcile(look(open_run(str(folder)), COPIES), PassNotes())
    return folder


def test_keeping(root):
    """The new save cannot be copied: it is verified all the same, the trouble is told, nothing half-made is left. It is
    kept as a link, which takes no room, until there is some."""
    run = open_run(str(root))
    write_torch(root, 200, seed=2)
    with no_file_larger_than(40_000):
        done = reconcile(look(run, COPIES), PassNotes())
    assert any("no space" in trouble.lower() for trouble in done.could_not_tell), done
    assert str(find_known_good(run).id) == "200.1"
    left = [name for name in files(root) if "/kept/" in name or ".tmp" in name]
    assert sorted(left) == [
        "_ckptguard/kept/net-#.pt/000000000100.1.json",
        "_ckptguard/kept/net-#.pt/000000000100.1/net-100.pt",
        "_ckptguard/kept/net-#.pt/000000000200.1.json",
        "_ckptguard/kept/net-#.pt/000000000200.1/net-200.pt",
    ]
    assert read_kept(run, CheckpointId("net-#.pt", 200, 1)).how == "link"
    assert reconcile(look(run, COPIES), PassNotes()).room.problem == "not enough room: one copy only"
    vars(SHARED).update(vars(SharedSpace()))  # as after ten minutes
    reconcile(look(run, COPIES), PassNotes())
    assert read_kept(run, CheckpointId("net-#.pt", 200, 1)).how == "copy"
    assert not os.path.samefile(root / "net-200.pt", at(root, "_ckptguard/kept/net-#.pt/000000000200.1/net-200.pt"))


def test_restoring(root, tmp_path):
    """DEST is as it was: absent."""
    before = files(root)
    with no_file_larger_than(40_000), pytest.raises(StorageFullError, match="no space left"):
        restore(look(open_run(str(root))), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert files(root) == before


def test_rolling_back(root):
    """The copy cannot be put back: nothing was moved, and with space it works."""
    run = open_run(str(root))
    (root / "net-100.pt").unlink()
    write_torch(root, 200, seed=2)
    os.truncate(root / "net-200.pt", 5000)
    before = files(root)
    with no_file_larger_than(40_000), pytest.raises(StorageFullError):
        roll_back(look(run, COPIES), GoBack(reason="NaN", check_writing=False))
    assert files(root) == before
    assert roll_back(look(run, COPIES), GoBack(reason="NaN", check_writing=False)).put_back


def test_recording(root):
    """Not even a verdict can be written: the pass says so, and the next one, with space, makes up for it."""
    run = open_run(str(root))
    write_torch(root, 200, seed=2)
    with no_file_larger_than(10):
        done = reconcile(look(run, COPIES), PassNotes())
    assert done.could_not_tell
    assert str(find_known_good(run).id) == "100.1"
    reconcile(look(run, COPIES), PassNotes())
    assert str(find_known_good(run).id) == "200.1"


def test_going_back_to_files_of_the_users_own(tmp_path):
    """Nothing was verified yet, and no verdict can be written: the newest file that is good as it is read is loaded."""
    model = torch.nn.Linear(3, 2)
    options = {
        "save": lambda path, step: torch.save(model.state_dict(), path),
        "load": lambda path: model.load_state_dict(torch.load(path, weights_only=True)),
    }
    guard = ckptguard.TrainingGuard(tmp_path / "run", model=model, daemon="off", settings=QUICK, **options)
    saved = []
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight += 1
        guard.save(step=step)
        saved.append(model.weight.detach().clone())
    newest = tmp_path / "run" / "step-3.pt"
    newest.write_bytes(newest.read_bytes().replace(saved[2].numpy().tobytes(), saved[1].numpy().tobytes()))
    with no_file_larger_than(10):
        assert guard.rollback("NaN") == 2
    assert torch.equal(model.weight, saved[1])
