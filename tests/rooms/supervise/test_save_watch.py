"""What supervise does about saves after the command died."""

import gc
import itertools
import os
import random
import threading

import pytest
import torch
from support import trainer_saves
from support.runs import QUICK, write_torch
from support.supervised_runs import save_watch
from support.trainer_saves import SICK, TRAINERS, load, save, two_folders, update_of, weights_of

from ckptguard.errors import BusyError, CkptguardError, StorageError, WorkerError
from ckptguard.recover import roll_back
from ckptguard.scan import scan_files
from ckptguard.storage.local.local_storage import LocalStorage


def unreadable(storage, keys, options, progress):
    """A scanner whose process is always killed."""
    raise WorkerError("the scanning process was killed")


@pytest.mark.parametrize("readable", [True, False])
def test_after_a_crash_only_what_is_of_no_use_is_moved_aside(readable, tmp_path):
    """Half-written saves are; whole ones of which nothing could be told stay."""
    scanner = scan_files if readable else unreadable
    watch = save_watch(str(tmp_path), QUICK, scanner)
    watch.prepare()
    watch.begin()
    for step in (10, 20):
        write_torch(tmp_path, step, seed=step)
    cut = (tmp_path / "net-20.pt").read_bytes()
    for step in (10, 20):
        (tmp_path / f"net-{step}.pt").write_bytes(cut[: len(cut) // 2])
    went = watch.back.go_back([], "the command ended with exit code 1")
    assert list(went.quarantined) == (["net-10.pt", "net-20.pt"] if readable else [])
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ([] if readable else ["net-10.pt", "net-20.pt"])


@pytest.fixture
def watch(tmp_path):
    """A watch over a run that keeps copies, before the first start."""
    kept = QUICK.changed(keep="copy", keep_good=3)
    found = save_watch(str(tmp_path / "run"), kept, scan_files)
    found.prepare()
    found.begin()
    return found


def fall_sick(watch, run, train):
    """Three healthy epochs and a sick one; the watch goes back, and the command is started again."""
    for epoch in (1, 2, 3):
        train(run, epoch)
        assert watch.last_look() == []
    train(run, 4, sick=SICK)
    sick = watch.last_look()
    assert sick
    watch.back.go_back(sick, "the command has sick saves")
    watch.begin()


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_every_trainer_goes_on_from_its_own_name(watch, tmp_path, name):
    """And what it saves then is compared with what it went back to."""
    train, resume = TRAINERS[name]
    fall_sick(watch, tmp_path / "run", train)
    assert update_of(load(tmp_path / "run" / resume)) == 30
    assert watch.last_look() == []
    train(tmp_path / "run", 4)
    assert watch.last_look() == []


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_training_that_begins_anew_is_seen_by_its_first_save_and_undone(watch, tmp_path, name, epochs):
    """Its saves are moved aside, and every name holds the known-good again; also if it came as far as that before it
    was stopped, and saved the same bytes once more."""
    train, resume = TRAINERS[name]
    run = tmp_path / "run"
    fall_sick(watch, run, train)
    train(run, 1)
    anew = watch.last_look()
    for epoch in range(2, epochs + 1):
        train(run, epoch)
    assert [s.anew for s in anew] == [True], "it is healthy, and yet"
    assert "training began from scratch" in anew[0].reason
    watch.back.go_back(anew, "the command began from scratch")
    assert update_of(load(run / resume)) == 30
    assert {update_of(load(path)) for path in run.glob("*.p*")} <= {10, 20, 30}


def failing_at(patch, step):
    """Have a rollback fail: "busy", "differs", or while the n-th file is copied or moved."""
    if step == "busy":

        def busy(run, **how):
            raise BusyError("another process is moving files")

        patch.setattr(roll_back, "run_lock", busy)
    elif step == "differs":
        patch.setattr(roll_back, "copy_differs", lambda *_, **__: "it differs")
    else:
        left = itertools.count(step, -1)

        def failing(act):
            def fails(self, source, target, **how):
                if next(left) == 1:
                    raise StorageError("the disk failed", key=source)
                return act(self, source, target, **how)

            return fails

        patch.setattr(LocalStorage, "copy", failing(LocalStorage.copy))
        patch.setattr(LocalStorage, "move", failing(LocalStorage.move))


def contents(run):
    """What each file of the trainer holds; a link without its file is none."""
    return {path: path.read_bytes() for path in run.rglob("*.p*") if "_ckptguard" not in path.parts and path.exists()}


@pytest.mark.parametrize("case", range(28))
def test_a_rollback_that_fails_loses_nothing_of_a_training_that_began_anew(case, tmp_path, monkeypatch):
    """Whatever it wrote and however the good save was kept: afterwards the good save is under its name, or all files
    are there as they were, and it is said why. What failed between two moves the next rollback mends."""
    chance = random.Random(case)
    run, name = tmp_path / "run", sorted(TRAINERS)[case % len(TRAINERS)]
    train, resume = TRAINERS[name]
    ways = ("auto", "copy") if name == "nanoGPT" else ("auto", "copy", "link")  # it writes into what a link would keep
    kept = QUICK.changed(keep=chance.choice(ways), keep_good=3)
    watch = save_watch(str(run), kept, scan_files)
    watch.prepare()
    watch.begin()
    fall_sick(watch, run, train)
    monkeypatch.setattr(trainer_saves, "SEED", chance.choice((1, 1000)))  # the same bytes again, or others
    train(run, 1)
    anew = watch.last_look()
    assert [s.anew for s in anew] == [True]
    for epoch in range(2, chance.randint(1, 4) + 1):
        train(run, epoch)
        if chance.random() < 0.5:
            watch.last_look()
    written, step = contents(run), chance.choice(("busy", "differs", *range(1, 9), None))
    said = None
    with monkeypatch.context() as patch:
        if step is not None:
            failing_at(patch, step)
        try:
            watch.back.go_back(anew, "the command began from scratch")
        except CkptguardError as error:
            said = error.message
    if said is not None and contents(run) != written:
        assert step not in ("busy", "differs")
        watch.back.go_back(anew, "once more")
        said = None
    if said is None:
        state = load(run / resume)
        assert torch.equal(state["model"]["layer.weight"], weights_of(30, 1))
    else:
        assert said
        assert contents(run) == written


def test_an_earlier_stage_in_another_folder_is_not_gone_back_to(watch, tmp_path):
    """It counts higher, and has names of its own; the command saves elsewhere."""
    run = tmp_path / "run"
    save(run / "pretrained/model_100.pt", 1000, epoch=100)
    watch.last_look()
    watch.prepare()  # as the next supervise does
    fall_sick(watch, run, lambda run, epoch, **sick: two_folders(run, epoch, **sick))
    assert {path.name for path in run.glob("*/*.pt")} == {
        "model_100.pt",
        "last.pt",
        *(f"epoch_{n}.pt" for n in (1, 2, 3)),
    }
    assert update_of(load(run / "weights/last.pt")) == 30
    two_folders(run, 4)
    assert watch.last_look() == [], "nothing started from scratch"


def test_of_several_trainings_only_the_sick_ones_go_back(watch, tmp_path):
    """One command that trains twice; each training resumes from its own names."""
    run = tmp_path / "run"

    def train(run, epoch, *, sick=False):
        two_folders(run / "seed0", epoch, sick=sick)
        two_folders(run / "seed1", epoch + 10)

    fall_sick(watch, run, train)
    updates = {str(p.relative_to(run)): update_of(load(p)) for p in run.glob("*/weights/last.pt")}
    assert updates == {"seed0/weights/last.pt": 30, "seed1/weights/last.pt": 140}
    train(run, 4)
    assert watch.last_look() == []
    assert {int(p.stem.removeprefix("epoch_")) for p in run.glob("seed1/epochs/*.pt")} == {11, 12, 13, 14}


def test_a_watch_that_nobody_has_any_more_takes_no_inotify(tmp_path):
    """A process that supervises many runs, one after the other, must not run out of them."""

    def instances() -> int:
        return sum(os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:inotify" for fd in descriptors())

    def descriptors() -> list[str]:
        return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]

    gc.collect()
    before, threads = instances(), set(threading.enumerate())
    watch = save_watch(str(tmp_path), QUICK, scan_files)
    watch.prepare()
    watch.last_look()
    assert instances() == before + 1
    [thread] = [one for one in threading.enumerate() if one.name == "watch" and one not in threads]
    del watch
    gc.collect()
    thread.join(timeout=60)
    assert instances() == before
