"""The n-th operation on storage fails, in every way, once or for ever, in each thing that a store does: what was
known-good restores byte for byte, nothing damaged is GOOD, and nothing is left behind."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil

import pytest
from support.faulty_storage import Fault, Faults, injected
from support.store_operations import OPERATIONS, Stage, build
from support.store_promises import arrived_wrong, violations
from support.tiny_run import (
    WEIGHTS,
    clone,
    files_below,
    forget,
    name_of,
)

from ckptguard.errors import CkptguardError
from ckptguard.records.run import open_run

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
# In the short form only some n of each: which ones differs from one way of failing to the next.
STRIDE = 1 if FULL else 97
KINDS = ("memory", "local")


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """The runs that are copied for every failure, by kind of storage and whether a save is pending."""
    made = {}
    for kind, pending in itertools.product(KINDS, (False, True)):
        folder = tmp_path_factory.mktemp("template") / "run"
        folder.mkdir()
        url = str(folder) if kind == "local" else f"memory://template-{secrets.token_hex(4)}"
        made[kind, pending] = (url, build(url, pending=pending))
    yield made
    for url, _ in made.values():
        if url.startswith("memory://"):
            forget(url)


@pytest.mark.campaign
@pytest.mark.timeout(7200 if FULL else 300)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_nothing_is_lost(name, kind, templates, tmp_path, capsys):
    """For n = 1, 2, ... until the operation passes untouched."""
    operation = OPERATIONS[name]
    source, saved = templates[kind, operation.pending]
    struck, wrong, untouched = 0, [], False
    for offset, (fault, forever) in enumerate(itertools.product(Fault, (False, True))):
        for number in itertools.count(1 + (offset * 7) % STRIDE, STRIDE):
            token = secrets.token_hex(6)
            stage = Stage(
                url=f"memory://nth-{token}" if kind == "memory" else str(tmp_path / token / "run"),
                replica=f"memory://nth-{token}-replica" if kind == "memory" else str(tmp_path / token / "replica"),
                dest=tmp_path / token / "dest",
            )
            clone(source, stage.url)
            faults = Faults(fault, number, forever=forever)
            try:
                with injected(faults):
                    operation.act(open_run(stage.url), stage)
            except CkptguardError:
                pass
            if not faults.reached and untouched:  # what nothing happened to was looked at before
                stage.clear()
                shutil.rmtree(tmp_path / token, ignore_errors=True)
                break
            case = f"{name} on {kind}, {fault.name} at {number}{' and on' if forever else ''}: {faults.struck[:2]}"
            if stage.dest.exists():
                step = max(saved)
                got = {s: files_below(str(stage.dest), name_of(s)) for s in saved}
                if any(files and files != saved[s] for s, files in got.items()) or not any(got.values()):
                    wrong.append(f"{case}: {sorted(p.name for p in stage.dest.rglob('*'))} restored of {step}")
            lied = fault in (Fault.WRONG_BYTES, Fault.TRUNCATED)
            wrong += [f"{case}: {w}" for w in arrived_wrong(stage, saved, lied=lied)]
            wrong += [f"{case}: {w}" for w in violations(stage, saved, operation, lied=lied)]
            stage.clear()
            shutil.rmtree(tmp_path / token, ignore_errors=True)
            if not faults.reached:
                untouched = True
                break
            struck += 1
    with capsys.disabled():
        if FULL:
            print(f"\n{name} on {kind}: {struck} failures, {len(wrong)} violations")
    assert not wrong, "\n".join([f"{len(wrong)} violations in {struck} failures:", *wrong[:20]])
    assert struck >= 4
    assert WEIGHTS in saved[600]
