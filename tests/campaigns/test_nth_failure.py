"""The n-th operation on storage fails, in every way, once or for ever, in each thing that a store does: what was
known-good restores byte for byte, nothing damaged is GOOD, and nothing is left behind."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil

import pytest
from support.faulty_storage import Fault, Faults, injected
from support.store_operations import OPERATIONS, Operation, Stage, build
from support.tiny_run import (
    TINY,
    WEIGHTS,
    Content,
    candidates,
    clone,
    cycle,
    files_below,
    forget,
    inline,
    leftovers,
    name_of,
)
from support.views import look

from ckptguard.errors import CkptguardError, RecordsError
from ckptguard.records.run import Run, open_run
from ckptguard.recover.restore import restore
from ckptguard.replicas.replicate import replicate
from ckptguard.runs.history import load_history
from ckptguard.runs.work import Work
from ckptguard.values.verdict import Outcome

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


def places(run: Run, step: int) -> list[Content]:
    """The content of a step wherever it lies: in place, kept, in the trash, aside."""
    name, folders = name_of(step), {""}
    for top in ("kept", "trash", "quarantine"):
        for entry in run.records.list(top, recursive=True):
            above, found, _ = entry.key.partition(f"/{name}/")
            folders |= {f"_ckptguard/{above}/"} if found else set()
    return [files_below(run.url, folder + name) for folder in sorted(folders)]


def violations(stage: Stage, saved: dict[int, Content], operation: Operation, fault: Fault):
    """What is wrong, by a storage that is healthy again. Where it lied, a good one may look damaged, a copy may be
    damaged until it is used, and a record may be unreadable, which is said."""
    run, known = open_run(stage.url), operation.known
    lied = fault in (Fault.WRONG_BYTES, Fault.TRUNCATED)
    wrong = []
    for moment in ("at once", "after a pass"):
        out = stage.dest.with_name("out")
        try:
            done = restore(look(run, TINY), str(out), work=Work(scanner=inline))
            if files_below(str(out), name_of(done.step)) != saved[done.step]:
                wrong.append(f"{moment}: {done.step} came back as something else")
            if done.step not in known and not lied:
                wrong.append(f"{moment}: {done.step} came back, not one of {known}")
        except CkptguardError as error:
            wrong.append(f"{moment}: {type(error).__name__}: {error}")
        shutil.rmtree(out, ignore_errors=True)
        for found in candidates(run):
            place = name_of(found.id.step) if found.in_place else f"_ckptguard/{found.copy.checkpoint_key}"
            if not (lied and found.answer.kept) and files_below(stage.url, place) != saved[found.id.step]:
                wrong.append(f"{moment}: {found.answer.id} is known-good at {place}, and damaged")
        for step, files in saved.items():
            damaged = step == 200
            if (
                not damaged
                and step not in {*operation.removes, *(operation.alone if lied else ())}
                and files not in places(run, step)
            ):
                wrong.append(f"{moment}: nothing whole is left of {step}")
        if moment == "at once":
            last = cycle(run)
            wrong += [f"the pass: {said}" for said in last.could_not_tell if not lied]
    wrong += [f"left behind: {key}" for key in leftovers(run)]
    for id, standing in load_history(run).standings("model-#").items():
        step, generation = id.step, id.generation
        whole = files_below(stage.url, name_of(step)) == saved[step]
        if whole and standing.outcome is Outcome.BAD and not lied and step not in (200, 300):
            wrong.append(f"{step}.{generation} is whole, and BAD")
    return wrong


def arrived_wrong(stage: Stage, saved: dict[int, Content], fault: Fault) -> list[str]:
    """What a replica calls good and is not. Replicating again, by a healthy storage, makes it whole."""
    if not files_below(stage.replica, ""):
        return []
    wrong = []
    for moment in ("at once", "sent again"):
        try:
            there = open_run(stage.replica, must_exist=False)
        except RecordsError:  # the store lied about the first record, and says so until it is written again
            assert moment == "at once", "sent again, and still nobody can open it"
            assert fault in (Fault.WRONG_BYTES, Fault.TRUNCATED)
            replicate(look(open_run(stage.url), TINY), stage.replica, work=Work(scanner=inline))
            continue
        for found in candidates(there):
            if found.in_place and files_below(stage.replica, name_of(found.id.step)) != saved[found.id.step]:
                wrong.append(f"{moment}: {found.answer.id} is good in the replica, and damaged")
        if moment == "at once":
            again = replicate(look(open_run(stage.url), TINY), stage.replica, work=Work(scanner=inline))
            if fault not in (Fault.WRONG_BYTES, Fault.TRUNCATED):
                left = [f"{c.id}: {c.message}" for c in again.checkpoints if c.done not in ("there", "sent")]
                wrong += [f"not sent again: {said}" for said in (*left, again.trouble) if said]
    return [*wrong, *(f"left in the replica: {key}" for key in leftovers(there))]


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
            wrong += [f"{case}: {w}" for w in arrived_wrong(stage, saved, fault)]
            wrong += [f"{case}: {w}" for w in violations(stage, saved, operation, fault)]
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
