"""``known-good`` for people: what changed since it was read is read; with --read all that is answered."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.tiny_run import TINY, WEIGHTS, cycle, name_of, poison, save

from ckptguard.records.after_seal import note_ctimes
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.values.ids import CheckpointId

NONE = TINY.changed(keep="none")


def saved(root: Path, tiny=NONE) -> None:
    """Three good checkpoints."""
    for step in (100, 200, 300):
        save(str(root), step, step)
    cycle(open_run(str(root)), tiny)


def poison_in_secret(path: Path) -> None:
    """Poison a file and give it its old mtime."""
    times = path.stat()
    poison(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_the_command_reads_what_changed(root, invoke, document):
    """A touched one is answered after it was read. A poisoned one never is, even with its old mtime. One with the ctime
    on record, too, is only found by --read."""
    saved(root)
    (root / name_of(300) / WEIGHTS).touch()
    run = open_run(str(root))
    assert str(find_known_good(run).id) == "200.1"
    assert invoke("known-good", root).stdout == f"{root / name_of(300)}\n"
    assert str(find_known_good(run).id) == "300.1"
    poison(root / name_of(300) / WEIGHTS)
    listed = document("list", root)[1]["checkpoints"]
    assert [(c["outcome"], c["changed"]) for c in listed] == [("good", False), ("good", False), ("good", True)]
    assert "changed" in invoke("list", root).stdout
    assert document("status", root)[1]["changed"] == [name_of(300)]
    assert "changed" in invoke("status", root).stdout
    assert "changed" in invoke("show", root / name_of(300)).stdout
    assert invoke("known-good", root).stdout == f"{root / name_of(200)}\n"
    poison_in_secret(root / name_of(200) / WEIGHTS)
    assert invoke("known-good", root).stdout == f"{root / name_of(100)}\n"


def test_what_no_time_tells_is_found_by_reading(root, invoke):
    """Where even the ctime on record is that of the damaged file, only --read finds the damage."""
    saved(root)
    path = root / name_of(300) / WEIGHTS
    poison_in_secret(path)
    id = CheckpointId("model-#", 300, 1)
    note_ctimes(open_run(str(root)), id, {f"{name_of(300)}/{WEIGHTS}": path.stat().st_ctime_ns})
    assert invoke("known-good", root).stdout == f"{root / name_of(300)}\n"
    assert invoke("known-good", root, "--read").stdout == f"{root / name_of(200)}\n"
    assert invoke("known-good", root).stdout == f"{root / name_of(200)}\n"


def test_what_was_saved_anew_is_answered_as_what_it_is(root, invoke, document):
    """A good save of the same name that nobody read yet is a generation of its own, and the answer."""
    saved(root)
    save(str(root), 300, 9)
    told = document("known-good", root)[1]
    assert (told["path"], told["id"]) == (str(root / name_of(300)), "300.2")
    assert invoke("known-good", root, "--read").stdout == f"{root / name_of(300)}\n"


@pytest.mark.parametrize("options", [(), ("--read",)])
def test_a_copy_of_ours_is_read_too(root, invoke, options):
    """A kept copy is held against what was sealed, asked or not: who opened it by its path may have saved over it. A
    wrong one is no answer."""
    saved(root, TINY)
    shutil.rmtree(root / name_of(300))
    answer = Path(invoke("known-good", root, *options).stdout.strip())
    assert (answer / WEIGHTS).resolve().relative_to(root).parts[:2] == ("_ckptguard", "kept")
    poison((answer / WEIGHTS).resolve())
    assert invoke("known-good", root, *options).stdout == f"{root / name_of(200)}\n"
