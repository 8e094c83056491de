"""Many processes on one run: savers that seal at once, and two daemons that verify, keep and prune."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.records_on_disk import key_of
from support.tiny_run import SERIES, TINY, candidates, content, cycle, files_below, leftovers, name_of

from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.values.ids import CheckpointId

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
WRITERS = 8 if FULL else 3
SAVES = 200 if FULL else 8
ROUNDS = 500 if FULL else 8

# Saves and seals as our own writer does: the files under a name of its own, then the manifest. With "same" all write
# the same steps, of which each step has one winner; otherwise each has its own.
SAVER = """
import sys
sys.path[:0] = sys.argv[5:]
from pathlib import Path
from support.tiny_run import SERIES, content, files_of_manifest, name_of
from ckptguard.errors import BusyError
from ckptguard.verification.seal import seal_written
from ckptguard.records.run import open_run

assert "torch" not in sys.modules
root, number, saves, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
run = open_run(root)
print("ready", flush=True)
sys.stdin.readline()
for index in range(1, saves + 1):
    step = index if steps == "same" else number * 1000 + index
    place = f"writer-{number}/step-{step}" if steps != "same" else f"step-{step}"
    try:
        seal_written(run, path=place, layout="plain_folder", step=step, files=files_of_manifest(place, step + number))
        print("won", step, number, flush=True)
    except BusyError:
        print("lost", step, number, flush=True)
print("done", flush=True)
"""

# A daemon's loop, as often as it is asked.
LOOP = """
import sys
sys.path[:0] = sys.argv[2:]
from support.tiny_run import TINY, inline
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.runs.run_view import open_view
from ckptguard.runs.work import Work

assert "torch" not in sys.modules
settings, notes = TINY.changed(keep_last=2, trash_grace=0.0), PassNotes()
for line in sys.stdin:
    notes.prune_at = 0.0
    done = reconcile(open_view(sys.argv[1], settings), notes, work=Work(scanner=inline), assume_quiet=True)
    ids = " ".join(str(c.id) for c in done.checked)
    print("\\t".join([ids, " ".join(done.pruned), *done.could_not_tell]), flush=True)
"""
TESTS = str(Path(__file__).parents[1])
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


@pytest.mark.campaign
@pytest.mark.timeout(3600 if FULL else 300)
@pytest.mark.parametrize("steps", ["same", "different"])
def test_each_generation_has_one_writer(steps, tmp_path):
    """Of writers of one step each seals a generation of its own, or is told that it lost; every manifest is one
    writer's, whole, and none is missing."""
    root = tmp_path / "run"
    root.mkdir()
    words = [[str(root), str(n), str(SAVES), steps, TESTS] for n in range(WRITERS)]
    processes = [subprocess.Popen([sys.executable, "-c", SAVER, *own], **PIPES) for own in words]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate()[0].split("\n") for process in processes]
    assert [lines[-2] for lines in said] == ["done"] * WRITERS
    outcomes = Counter(line.split()[0] for lines in said for line in lines[:-2])
    assert sum(outcomes.values()) == WRITERS * SAVES
    history = load_history(open_run(str(root)))
    places = {key_of(root, p.parent).rpartition("/")[2] for p in (root / "_ckptguard" / "manifests").rglob("*.json")}
    sealed = [id for s in map(_series, places) for id in history.sealed(s)]
    assert len(sealed) == outcomes["won"]
    manifests = [history.manifest(id) for id in sealed]
    assert len({m.nonce for m in manifests if m is not None}) == len(sealed)
    if steps == "different":
        assert outcomes["lost"] == 0
    for step in range(1, SAVES + 1) if steps == "same" else ():
        generations = sorted(id.generation for id in sealed if id.step == step)
        assert generations == list(range(1, len(generations) + 1))
        assert generations


@pytest.mark.campaign
@pytest.mark.timeout(3600 if FULL else 300)
def test_two_daemons_on_one_run(tmp_path):
    """Every save gets its verdict, nothing is pruned twice, the newest two good ones stay, and no verdict is lost."""
    root = tmp_path / "run"
    root.mkdir()
    daemons = [subprocess.Popen([sys.executable, "-c", LOOP, str(root), TESTS], **PIPES) for _ in range(2)]
    pruned: Counter[str] = Counter()
    ledger: set[str] = set()
    try:
        for turn in range(1, ROUNDS + 1):
            _save_whole(root, turn)
            for daemon in daemons:
                daemon.stdin.write("\n")
                daemon.stdin.flush()
            for daemon in daemons:
                _, gone, *troubles = daemon.stdout.readline().rstrip("\n").split("\t")
                assert troubles == [], turn
                pruned.update(gone.split())
            run = open_run(str(root))
            history = load_history(run)
            names = set(history.names[SERIES])
            assert ledger <= names
            ledger = names
            assert history.current_verdicts(SERIES)[CheckpointId(SERIES, turn, 1)].outcome.value == "good"
            good = [c for c in candidates(run) if c.in_place][:2]
            assert [c.id.step for c in good] == list(range(turn, max(turn - 2, 0), -1))
            for found in good:
                assert files_below(str(root), name_of(found.id.step)) == content(found.id.step)
    finally:
        for daemon in daemons:
            daemon.communicate()
    assert set(pruned.values()) <= {1}, "removed twice"
    assert sorted(int(p.name.partition("-")[2]) for p in root.glob("model-*")) == [ROUNDS - 1, ROUNDS]
    assert {id.step for id in load_history(open_run(str(root))).current_verdicts(SERIES)} == set(range(1, ROUNDS + 1))
    cycle(open_run(str(root)), TINY)
    assert leftovers(open_run(str(root))) == []


def _save_whole(root: Path, step: int) -> None:
    """A save that is there at once, as a trainer's rename makes it."""
    folder = root / f"tmp-{step}"
    folder.mkdir()
    for name, data in content(step).items():
        (folder / name).write_bytes(data)
    folder.rename(root / name_of(step))


def _series(folder: str) -> str:
    from ckptguard.values.ids import series_from_folder

    return series_from_folder(folder)
