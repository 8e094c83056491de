"""Folders that try to lead outwards, before the real command line: nothing outside is opened, nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faults.hostile.folders import HUBS, MODEL, ODD, TARGETS, WRONG, checkpoint
from faults.hostile.watching import Case, Inotify, check_cases
from support.format_files import torch_bytes
from support.hub_caches import Hub
from support.runs import write_torch
from support.unreadable import give_up_powers

LINUX = sys.platform == "linux"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that nobody may look into: whole checkpoints lie there, which a followed link would find good."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.safetensors").write_bytes(MODEL)
    (folder / "secret.pt").write_bytes(torch_bytes({"w": torch.ones(2)}))
    return folder


def watched(cases: list[Case], benign: Path, outside: Path) -> None:
    """Run them, and see that nobody, by whatever way, opened anything outside."""
    watch = Inotify(outside) if LINUX else None
    check_cases(cases, benign=benign)
    if watch is not None:
        assert watch.events() == []
        watch.close()


def test_nothing_outside_is_taken_for_a_checkpoints_file(tmp_path: Path, benign: Path, outside: Path) -> None:
    """Weights behind links and indexes that point outside are bad or incomplete; a plain folder is good."""
    place = tmp_path / "place"
    cases = [
        Case(kind, make(place / str(number), outside), codes=(3, 4))
        for number, (kind, make) in enumerate(WRONG.items())
    ]
    watched([*cases, Case("control", checkpoint(place / "control"), codes=(0,))], benign, outside)


def test_hub_caches_do_not_lead_outside(tmp_path: Path, benign: Path, outside: Path) -> None:
    """Links of a cache that leave its repository are told and not followed; the one beside it is good."""
    place = tmp_path / "place"
    cases = [
        Case(kind, make(place / str(number), outside), codes=(1, 3, 4))
        for number, (kind, make) in enumerate(HUBS.items())
    ]
    whole = Hub(place / "control" / "hub")
    whole.download({"model.safetensors": MODEL, "config.json": b"{}"})
    watched([*cases, Case("control", whole.repository(), codes=(0,))], benign, outside)


def test_targets_that_are_links(tmp_path: Path, benign: Path, outside: Path) -> None:
    """The user named them, so they are followed, and never read without an end."""
    place = tmp_path / "place"
    cases = [
        Case(kind, make(place / str(number), outside), codes=(code,), reads=("/dev",))
        for number, (kind, (make, code)) in enumerate(TARGETS.items())
    ]
    watched(cases, benign, outside)


UNREADABLE = {
    "weights": ("model.safetensors", "."),
    "the file itself": ("model.safetensors", "model.safetensors"),
    "the folder itself": (".", "."),
    "the folder around": (".", "model.safetensors"),
    "a folder inside": ("more", "."),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_may_not_be_read_is_neither_good_nor_bad(tmp_path: Path, kind: str) -> None:
    """Without the right to read, nobody can tell: exit 1, with what it is about, also for root without its powers."""
    hidden, target = UNREADABLE[kind]
    folder = checkpoint(tmp_path)
    (folder / "more").mkdir()
    closed = folder / hidden
    mode = closed.stat().st_mode
    closed.chmod(0)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ckptguard", "verify", str(folder / target), "--wait", "0"],
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
            preexec_fn=give_up_powers,
            env={**os.environ, "CKPTGUARD_SETTLE": "0"},
        )
    finally:
        closed.chmod(mode)
    assert done.returncode == 1, done
    assert "permission denied" in done.stdout + done.stderr
    assert closed.name in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.campaign
def test_odd_things_beside_weights_are_not_followed(tmp_path: Path, benign: Path, outside: Path) -> None:
    """Links, FIFOs, sockets, devices, names and depth end in an answer; nothing of them reaches the terminal."""
    place = tmp_path / "place"
    cases = [
        Case(kind, make(place / str(number), outside), codes=(0, 3, 4))
        for number, (kind, make) in enumerate(ODD.items())
    ]
    try:
        watched(cases, benign, outside)
    finally:
        # Python's own removal gives up on a thousand levels.
        subprocess.run(["rm", "-rf", str(place)], check=True, timeout=250)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", sorted(set(ODD) - {"a thousand levels"}))
def test_odd_things_in_a_run_are_not_followed(tmp_path: Path, benign: Path, outside: Path, kind: str) -> None:
    """The same in a run: records are written into the run and nowhere else."""
    run = tmp_path / "place" / "run"
    ODD[kind](run, outside)
    write_torch(run, 9, seed=1)
    case = Case(kind, run, codes=(0, 3, 4), writes=(os.path.realpath(run),))
    watched([case], benign, outside)


RECORDS = {
    "manifest": {"path": "../outside", "files": [{"path": "../outside/secret.pt", "size": 1, "format": "x"}]},
    "absolute manifest": {"path": "/etc/passwd", "files": []},
    "mark of a kept copy": {"path": "../../outside", "files": ["../../outside/secret.pt"]},
    "mark of a quarantine": {"path": "../outside/secret.pt", "files": ["../outside/secret.pt"], "signature": []},
}  # fmt: skip


def test_records_that_point_outside(tmp_path: Path, benign: Path, outside: Path) -> None:
    """Forged manifests, marks, formats and settings of a run lead nowhere, and the run is still answered for."""
    cases = []
    forged = {name: json.dumps(value).encode() for name, value in RECORDS.items()}
    forged |= {"nothing": b"", "noise": b"\xff" * 100, "deep": b"[" * 100_000, "number": b"1e999", "list": b"[]"}
    for number, (kind, text) in enumerate(forged.items()):
        run = tmp_path / "place" / str(number)
        write_torch(run, 9, seed=1)
        records = run / "_ckptguard"
        for key in ("manifests", "ledger", "kept", "quarantine", "incidents", "reference"):
            folder = records / key / "net-#.pt"
            folder.mkdir(parents=True)
            for name in ("000000000009.1.json", "000000000009.1.0001.good.json", "..json", "\x1b[2J.json"):
                (folder / name).write_bytes(text)
        (records / "format.json").write_text('{"format": 1}')
        (records / "settings.json").write_bytes(text)
        # Damaged records are "could not tell"; what counts is that they are never believed.
        cases.append(Case(kind, run, codes=(0, 1, 3, 4), writes=(os.path.realpath(run),)))
    watched(cases, benign, outside)


def test_records_behind_links(tmp_path: Path, benign: Path, outside: Path) -> None:
    """Parts of the records that are links outwards are neither read nor written through."""
    cases = []
    for number, key in enumerate(("ledger", "manifests", "kept", "format.json", "manifests/net-#.pt")):
        run = tmp_path / "place" / str(number)
        write_torch(run, 9, seed=1)
        link = run / "_ckptguard" / key
        link.parent.mkdir(parents=True)
        link.symlink_to(outside)
        if key != "format.json":
            (run / "_ckptguard" / "format.json").write_text('{"format": 1}')
        cases.append(Case(key, run, codes=(0, 1, 3, 4), writes=(os.path.realpath(run),)))
    before = sorted(os.listdir(outside))
    watched(cases, benign, outside)
    assert sorted(os.listdir(outside)) == before
