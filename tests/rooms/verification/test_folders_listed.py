"""Verifying one checkpoint of a run lists its own folder and a neighbour's, however many there are."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_known_good import write_run

# The interpreter itself tells which folders are listed, whoever asks and by whatever function.
LISTED = """
import json, os, sys

folders = []

def note(event, arguments):
    if event in ("os.scandir", "os.listdir"):
        place = arguments[0]
        folders.append(os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place))

from ckptguard.cli import main
sys.addaudithook(note)
try:
    main()
finally:
    print(json.dumps(folders), file=sys.stderr)
"""
COUNTS = (20, 200)


def listed(root: Path, *words: str) -> tuple[collections.Counter[str], str]:
    """The folders of a run that a command lists, relative to the run, and its output."""
    command, environment = [sys.executable, "-c", LISTED, *words], {**os.environ, "CKPTGUARD_SETTLE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folders = map(Path, json.loads(done.stderr.splitlines()[-1]))
    return collections.Counter(str(f.relative_to(root)) for f in folders if f.is_relative_to(root)), done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of good checkpoints, of which one has ten times as many."""
    found = {count: tmp_path_factory.mktemp(f"of-{count}") for count in COUNTS}
    for count, root in found.items():
        write_run(root, count)
    return found


@pytest.mark.parametrize("name", ["model-1", "model-9", "model-20", "model-9/model.safetensors"])
def test_the_listings_do_not_grow_with_the_run(runs, name):
    """The same folders are listed, as often, and of the checkpoints only the named one and a neighbour."""
    few, many = (listed(root, "verify", str(root / name))[0] for root in runs.values())
    assert few == many
    own = name.partition("/")[0]
    checkpoints = {folder for folder in many if folder.startswith("model-")}
    assert own in checkpoints
    assert len(checkpoints) <= 2
    assert sum(many.values()) <= 20, many
