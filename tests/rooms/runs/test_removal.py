"""Only what we can have made is removed, and only when it is old."""

from __future__ import annotations

import os
import random
import stat
import string
import subprocess
import sys
from pathlib import Path

import pytest
from support.store_operations import OPERATIONS, Stage, build
from support.views import look

from ckptguard.records.rewrites import Rewrite, record_rewrites
from ckptguard.records.run import Run, open_run
from ckptguard.runs.pointers import write_pointers
from ckptguard.runs.removal import remove_folder_of_ours, remove_leftover, remove_record, remove_temporary
from ckptguard.storage import open_storage
from ckptguard.upkeep.leftovers import collect_leftovers
from ckptguard.values.temporary_names import (
    EVERY,
    LEFT_IN_RECORDS,
    LEFT_IN_RUN,
    LINK,
    RECORD,
    REPLACED,
    RESTORE,
    ROLLBACK,
    SAVE,
    TemporaryName,
)

LONG_AGO = 1_000_000_000


def an_own_name(kind: TemporaryName) -> str:
    """A name as a process of ours makes it."""
    return kind.new("000000500-" if kind.middle else "")


def look_alikes(kind: TemporaryName, rng: random.Random) -> list[str]:
    """Names that begin or end like one of ours, and are none. Written without asking how ours are recognised."""
    own = an_own_name(kind)
    digits = "".join(rng.choices(string.hexdigits.lower()[:16], k=kind.digits))
    start = own[: -kind.digits]
    return [
        f"{start}experiment",
        f"{start}{digits[:-1]}",
        f"{start}{digits}0",
        f"{start}{digits[:-1]}{rng.choice('ghijkxyz_-. ')}",
        f"{start}{'ABCDEF0123456789' * 2}"[: len(own) - 1] + "F",
        f"{start}{('20261123' * 4)[: kind.digits]}",
        f"{own}.bak",
        f"{own} (copy)",
        f"my-{own}",
        f"{start}{digits[:-1]}\n",
        start.rstrip("-"),
    ]


def make(place: Path, kind: str, rng: random.Random, *, old: bool = True) -> None:
    """A file or a folder of a user, or a link to one."""
    if kind == "link":
        target = place.with_name(f"user-{rng.randrange(10**9)}")
        make(target, "folder", rng)
        place.symlink_to(target.name)
        if old:
            os.utime(place, (LONG_AGO, LONG_AGO), follow_symlinks=False)
        return
    if kind == "folder":
        (place / "deep").mkdir(parents=True)
        (place / "deep" / "notes.txt").write_bytes(rng.randbytes(20))
    else:
        place.write_bytes(rng.randbytes(20))
    if old:
        for path in (*place.rglob("*"), place):
            os.utime(path, (LONG_AGO, LONG_AGO))


def plant(folder: Path, rng: random.Random) -> list[Path]:
    """Put look-alikes of all our names into a folder, and names of ours that are of another kind, links, or fresh."""
    planted = []
    for kind in EVERY:
        for name in look_alikes(kind, rng):
            planted.append(folder / name)
            make(planted[-1], rng.choice(["file", "folder", "link"]), rng)
        own = ("file", "folder") if kind.kind == "either" else (kind.kind,)
        for other in [one for one in ("file", "folder", "link") if one not in own]:
            planted.append(folder / an_own_name(kind))
            make(planted[-1], other, rng)
        planted.append(folder / an_own_name(kind))
        make(planted[-1], "file" if kind.kind == "either" else kind.kind, rng, old=False)
    for kind in (ROLLBACK, SAVE, REPLACED):  # a name that we may have made, old, and in it what we cannot have made
        planted.append(folder / an_own_name(kind))
        make(planted[-1], "folder", rng)
    return planted


def seen(path: Path) -> list[tuple[object, ...]]:
    """Everything of a path: names, kinds, modes, times, bytes."""
    found = []
    for one in sorted([path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())]):
        info = one.lstat()
        data = one.read_bytes() if stat.S_ISREG(info.st_mode) else os.readlink(one) if one.is_symlink() else None
        found.append((str(one), info.st_mode, info.st_mtime_ns, data))
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_operation_touches_what_only_looks_like_ours(name, tmp_path):
    """Whatever is done in a run, each look-alike of our names is there afterwards as it was, wherever it is."""
    rng = random.Random(name)
    root, replica, dest = (tmp_path / part for part in ("run", "replica", "dest"))
    for folder in (root, replica, dest):
        folder.mkdir()
    stage, operation = Stage(str(root), str(replica), dest), OPERATIONS[name]
    build(stage.url, pending=operation.pending)
    series = next(folder for folder in (root / "_ckptguard" / "ledger").iterdir() if folder.is_dir())
    folders = [root, replica, root / "_ckptguard", series]
    before = [(path, seen(path)) for folder in folders for path in plant(folder, rng)]
    operation.act(open_run(stage.url), stage)
    collect_leftovers(look(open_run(stage.url)))
    assert [str(path) for path, was in before if seen(path) != was] == []


COMMANDS = {
    "daemon --once": ["ckptguard_daemon", "{run}", "--once"],
    "supervise": ["ckptguard", "supervise", "{run}", "--", sys.executable, "-c", "pass"],
    "verify": ["ckptguard", "verify", "{run}", "--wait", "0"],
    "rollback": ["ckptguard", "rollback", "{run}", "--force"],
    "doctor": ["ckptguard", "doctor", "{run}"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_touches_what_only_looks_like_ours(name, tmp_path, monkeypatch):
    """The same for whole commands, in processes of their own."""
    rng = random.Random(name)
    root = tmp_path / "run"
    root.mkdir()
    build(str(root), pending=True)
    before = [(path, seen(path)) for path in plant(root, rng)]
    module, *arguments = (part.format(run=root) for part in COMMANDS[name])
    monkeypatch.setenv("CKPTGUARD_SETTLE", "0")
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3, 4), done.stderr  # it did its work: the run has damaged checkpoints
    assert [str(path) for path, was in before if seen(path) != was] == []


@pytest.mark.torch
def test_no_save_of_a_guard_touches_what_only_looks_like_ours(tmp_path):
    """A guard that starts, saves, goes back and ends."""
    from support.guards import guard_of

    rng = random.Random(3)
    before = [(path, seen(path)) for path in plant(tmp_path, rng)]
    with guard_of(tmp_path) as guard:
        for step in (1, 2, 3):
            guard.save(step=step)
    assert [str(path) for path, was in before if seen(path) != was] == []
    assert len(list(tmp_path.glob("step-*"))) == 3


def a_recorded_path(run: Run) -> str:
    """The path of a file that a manifest names."""
    history = look(run).history
    [id, *_] = (id for series in history.names for id in history.sealed(series))
    return history.manifest(id).files[0].path


@pytest.mark.parametrize("kind", [*LEFT_IN_RUN, *LEFT_IN_RECORDS], ids=lambda kind: kind.start)
def test_what_a_killed_process_left_goes_when_it_is_old(kind, tmp_path):
    """The same look-alike test would pass if nothing was ever removed."""
    rng = random.Random(0)
    run = open_run(str(tmp_path))
    build(run.url, pending=False)
    folder = tmp_path if kind in LEFT_IN_RUN else tmp_path / "_ckptguard"
    old, fresh = folder / an_own_name(kind), folder / an_own_name(kind)
    inside = {ROLLBACK: a_recorded_path(run), SAVE: "model.safetensors"}.get(kind)
    for place in (old, fresh):
        if inside is None:
            make(place, "file" if kind.kind == "either" else kind.kind, rng, old=place is old)
            continue
        (place / inside).parent.mkdir(parents=True)
        (place / inside).write_bytes(b"half of it")
        if place is old:
            for path in (*place.rglob("*"), place):
                os.utime(path, (LONG_AGO, LONG_AGO))
    collect_leftovers(look(run))
    assert (old.exists(), fresh.exists()) == (False, True)


@pytest.mark.parametrize("link", [True, False], ids=["link", "file"])
def test_what_a_killed_rewrite_of_a_pointer_left_goes_when_it_is_old(tmp_path, monkeypatch, link):
    """It is beside the pointer, in whatever folder that is."""
    build(str(tmp_path), pending=False)
    pointer = tmp_path / "deep" / "er" / "latest"
    pointer.parent.mkdir(parents=True)
    pointer.symlink_to("model-100") if link else pointer.write_text("model-100")
    before = set(pointer.parent.iterdir())
    rewrite = Rewrite(key="deep/er/latest", link=link, old="model-100", new="model-200")
    record_rewrites(open_run(str(tmp_path)), [rewrite])
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(os, "replace", lambda *_, **__: os._exit(9))  # as a kill at that moment
        write_pointers(open_run(str(tmp_path)), [rewrite])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    [left] = set(pointer.parent.iterdir()) - before
    theirs = [pointer.with_name(an_own_name(LINK if link else RECORD)) for _ in range(2)]  # of other contents
    if link:
        theirs[0].symlink_to("model-300")
        os.utime(theirs[0], (LONG_AGO, LONG_AGO), follow_symlinks=False)
    else:
        make(theirs[0], "file", random.Random(4))
    make(theirs[1], "folder", random.Random(5))
    before.update(theirs)
    collect_leftovers(look(open_run(str(tmp_path))))
    assert os.path.lexists(left)
    os.utime(left, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    collect_leftovers(look(open_run(str(tmp_path))))
    assert set(pointer.parent.iterdir()) == before


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.start)
def test_names_are_recognised_by_what_makes_them(kind):
    """Each new name fits its own kind, and no look-alike does."""
    rng = random.Random(1)
    for _ in range(200):
        assert kind.fits(an_own_name(kind))
        assert [name for name in look_alikes(kind, rng) if kind.fits(name)] == []


def test_a_maker_can_only_remove_what_it_can_have_made(tmp_path):
    """A key that is no temporary, or that leads out of the records, is refused, and nothing is removed."""
    build(str(tmp_path / "run"), pending=False)
    run = open_run(str(tmp_path / "run"))
    storage = open_storage(str(tmp_path))
    make(tmp_path / "mine", "folder", random.Random(2))
    before = seen(tmp_path)
    for key in ("mine", "mine/deep/notes.txt", "", "tmp-rollback-experiment"):
        with pytest.raises(ValueError, match="no temporary"):
            remove_temporary(storage, key)
        with pytest.raises(ValueError, match="no temporary"):
            remove_folder_of_ours(str(tmp_path / key), RESTORE)
    for key in ("../mine", "", "/", "ledger/../../mine"):
        with pytest.raises(ValueError, match="no key of a record"):
            remove_record(run, key)
    for entry in storage.list(""):
        assert not remove_leftover(storage, entry, EVERY)
    assert seen(tmp_path) == before
