"""Shards of a fleet: together they are the whole, no two have the same run, and none changes when runs are added."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from servers.slurm import Slurm
from support.fleets import ledger_of, make_fleet
from support.markdown import ROOT, blocks

from ckptguard.decisions.bulk_order import shard_of

GUIDE = (ROOT / "docs/guides/bulk.md").read_text(encoding="utf-8")


def block_with(language: str, word: str) -> str:
    """The block of the guide about bulk work that has this word in it."""
    [found] = [one.text for one in blocks(GUIDE) if one.language == language and word in one.text]
    return found


@pytest.mark.parametrize("seed", range(50))
def test_the_shards_are_the_whole_whatever_is_added(seed):
    """Of any fleet, in any number of shards."""
    numbers = random.Random(seed)
    fleet = {f"{numbers.choice(['/data', 's3://b', '/d/é'])}/{numbers.getrandbits(30)}" for _ in range(60)}
    shards = numbers.randint(1, 90)
    before = {run: shard_of(run, shards) for run in fleet}
    assert all(1 <= number <= shards for number in before.values())
    more = fleet | {f"/later/{numbers.getrandbits(30)}" for _ in range(60)}
    assert {run: shard_of(run, shards) for run in more if run in fleet} == before


def test_shards_are_about_equal_and_always_the_same():
    """Of 8,000 runs in 8 shards each has its tenth part at least. Every release computes the same, as jobs may mix."""
    found = [shard_of(f"/data/runs/exp{n}", 8) for n in range(8000)]
    assert min(found.count(number) for number in range(1, 9)) > 800
    assert found[:8] == [5, 6, 2, 5, 4, 1, 3, 6]


def test_the_indexed_job_of_the_guide(tmp_path):
    """Kubernetes takes it, each index does its shard, and a bad checkpoint is no reason to try again."""
    yaml = pytest.importorskip("yaml", reason="no PyYAML here, which comes with kubernetes-validate")
    kubernetes = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here")
    job = yaml.safe_load(block_with("yaml", "completionMode"))
    kubernetes.validate(job, "1.37", strict=True)
    spec = job["spec"]
    [container] = spec["template"]["spec"]["containers"]
    [rule] = spec["podFailurePolicy"]["rules"]
    assert (rule["onExitCodes"]["containerName"], rule["onExitCodes"]["values"]) == (container["name"], [2, 3, 4])
    fleet = make_fleet(tmp_path / "fleet", 6, 1)
    environment = as_installed(tmp_path)
    assert (spec["completionMode"], container["command"][:2]) == ("Indexed", ["sh", "-c"])
    line = container["command"][2].replace("/data/runs", str(fleet))
    for index in range(spec["completions"]):
        subprocess.run(["sh", "-c", line], env={**environment, "JOB_COMPLETION_INDEX": str(index)}, check=True)
    assert len(ledger_of(fleet)) == 6


def as_installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which `ckptguard` is a command."""
    program = tmp_path / "bin/ckptguard"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptguard "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "CKPTGUARD_SETTLE": "0"}


@pytest.mark.timeout(300)
def test_the_job_array_of_the_guide(slurm: Slurm):
    """In a real Slurm of one node: its tasks together verify each checkpoint once."""
    place = slurm.place("array")
    fleet = make_fleet(place / "fleet", 5, 2)
    for path in (place, *place.rglob("*")):
        os.chown(path, slurm.uid, slurm.gid)
    script = block_with("sh", "--array").replace("/data/runs", str(fleet))
    script = (
        script.replace("--array=1-8", "--array=1-3")
        .replace("/8", "/3")
        .replace("--cpus-per-task=4", "--cpus-per-task=1")
    )
    job = slurm.submit(place, script.replace("\n\n", f"\n\nexport PATH={slurm.bin}:$PATH CKPTGUARD_SETTLE=0\n", 1))
    slurm.until_ended(job)
    assert len(ledger_of(fleet)) == 10, (place / "out").read_text()
