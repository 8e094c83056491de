"""What must hold of a small run (`store_operations`) after anything failed in it."""

from __future__ import annotations

import shutil

from ckptguard.errors import CkptguardError, RecordsError
from ckptguard.records.run import Run, open_run
from ckptguard.recover.restore import restore
from ckptguard.replicas.replicate import replicate
from ckptguard.runs.history import load_history
from ckptguard.runs.work import Work
from ckptguard.values.temporary_names import RECORD
from ckptguard.values.verdict import Outcome
from support.store_operations import Operation, Stage
from support.tiny_run import TINY, Content, candidates, cycle, files_below, inline, leftovers, name_of
from support.views import look


def places(run: Run, step: int) -> list[Content]:
    """The content of a step wherever it lies: in place, kept, in the trash, aside."""
    name, folders = name_of(step), {""}
    for top in ("kept", "trash", "quarantine"):
        for entry in run.records.list(top, recursive=True):
            above, found, _ = entry.key.partition(f"/{name}/")
            folders |= {f"_ckptguard/{above}/"} if found else set()
    return [files_below(run.url, folder + name) for folder in sorted(folders)]


def violations(stage: Stage, saved: dict[int, Content], operation: Operation, *, lied: bool = False) -> list[str]:
    """What is wrong, by a storage that is healthy again. Where it lied, a good one may look damaged, a copy may be
    damaged until it is used, and a record may be unreadable, which is said."""
    run, known = open_run(stage.url), operation.known
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
    for id, current_verdict in load_history(run).current_verdicts("model-#").items():
        step, generation = id.step, id.generation
        whole = files_below(stage.url, name_of(step)) == saved[step]
        wrongly = (Outcome.BAD, Outcome.INCOMPLETE)
        if whole and current_verdict.outcome in wrongly and not lied and step not in (200, 300):
            wrong.append(f"{step}.{generation} is whole, and {current_verdict.outcome.value}")
    return wrong


def arrived_wrong(stage: Stage, saved: dict[int, Content], *, lied: bool = False, killed: bool = False) -> list[str]:
    """What a replica calls good and is not. Replicating again, by a healthy storage, makes it whole. What a process
    that was killed left there goes with the replica's own next pass."""
    if not files_below(stage.replica, ""):
        return []
    wrong = []
    for moment in ("at once", "sent again"):
        try:
            there = open_run(stage.replica, must_exist=False)
        except RecordsError:  # the store lied about the first record, and says so until it is written again
            assert moment == "at once", "sent again, and still nobody can open it"
            assert lied
            replicate(look(open_run(stage.url), TINY), stage.replica, work=Work(scanner=inline))
            continue
        for found in candidates(there):
            below = files_below(stage.replica, name_of(found.id.step))
            arrived = {name: data for name, data in below.items() if not RECORD.fits(name)}  # see `leftovers`
            if found.in_place and arrived != saved[found.id.step]:
                wrong.append(f"{moment}: {found.answer.id} is good in the replica, and damaged")
        if moment == "at once":
            again = replicate(look(open_run(stage.url), TINY), stage.replica, work=Work(scanner=inline))
            if not lied:
                left = [f"{c.id}: {c.message}" for c in again.checkpoints if c.done not in ("there", "sent")]
                wrong += [f"not sent again: {said}" for said in (*left, again.trouble) if said]
    if killed:
        cycle(there)
    return [*wrong, *(f"left in the replica: {key}" for key in leftovers(there))]
