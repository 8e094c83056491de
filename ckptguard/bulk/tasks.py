"""The tasks: verify, scrub or replicate one checkpoint, scan a part of a large one, or repair one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ckptguard.bulk.messages import Item, Task, TaskAnswer, item_of
from ckptguard.layouts import Checkpoint
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import Reread, ScrubListener, ScrubOrder, scrub
from ckptguard.replicas.replicate import replicate
from ckptguard.replicas.send_checkpoint import Replicated
from ckptguard.reporting.channels import Event
from ckptguard.reporting.incidents_of_saves import IncidentsOfSaves
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView, open_view
from ckptguard.runs.settling import quiet_in
from ckptguard.runs.work import Work
from ckptguard.scan import Progress, Scanner, ScanOptions
from ckptguard.scan.result import Scan, ScannedFile
from ckptguard.storage import Storage
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import FULLY, judge_in_run
from ckptguard.verification.found_sums import find_sums

# What replicating a checkpoint did, as an outcome. Anything else has left it where it was.
_OF_REPLICA = {"sent": Outcome.GOOD, "there": Outcome.GOOD, "damaged": Outcome.BAD}


def verify_one(task: Task, settings: Settings, work: Work) -> TaskAnswer:
    """Verify one checkpoint, record the verdict, and open an incident if it is bad. `task.scans` is not read again."""
    view, checkpoint = _near(task, settings)
    if checkpoint is None:
        return TaskAnswer()  # the trainer or retention has removed it
    quiet = quiet_in(view, checkpoint)
    if quiet is None:
        return TaskAnswer(items=(item_of(task, Outcome.PENDING, message="it is still being written"),))
    if task.scans:
        scanner = _scanned_before(view.run.storage, task.scans, work.scanner)
        work = msgspec.structs.replace(work, scanner=scanner)
    notes: list[str] = []
    events: list[Event] = []
    found = judge_in_run(view, FULLY, notes, work)(quiet)
    tell, log = (lambda run, event: events.append(event)), (lambda event, **fields: None)
    with IncidentsOfSaves(settings, source="cli", log=log, tell=tell) as incidents:
        trouble = incidents.judged(view.run, found)
    notes += [trouble] if trouble is not None else []
    return TaskAnswer(items=(_item_read(task, found),), events=tuple(events), trouble="; ".join(notes))


def scan_part(task: Task, settings: Settings, work: Work) -> TaskAnswer:
    """Scan some files of a large checkpoint: every digest that its verification will ask for."""
    view, checkpoint = _near(task, settings)
    if checkpoint is None:
        return TaskAnswer(trouble="it was removed meanwhile")
    storage = view.run.storage
    sums = find_sums(storage, checkpoint, view.sum_lists_beside(checkpoint))
    return TaskAnswer(scan=work.scanner(storage, task.files, sums.added_to(ScanOptions()), work.progress))


def scrub_one(task: Task, settings: Settings, work: Work) -> TaskAnswer:
    """Read one place of a verified checkpoint again."""
    assert task.id is not None
    events: list[Event] = []
    order = ScrubOrder(only=(task.id, task.place))
    watcher = ScrubListener(tell=lambda run, event: events.append(event))
    done = scrub(open_view(task.url, settings), order, work=work, watcher=watcher)
    items = tuple(_item_read(task, one) for one in done.places)
    return TaskAnswer(items=items, events=tuple(events), trouble="; ".join(done.could_not_tell))


def replicate_one(task: Task, settings: Settings, work: Work) -> TaskAnswer:
    """Send one checkpoint to one replica, and read it back from there."""
    assert task.id is not None
    done = replicate(open_view(task.url, settings), task.place, work=work, only=[task.id])
    items = tuple(replica_item(task, one) for one in done.checkpoints if one.done != "gone")
    return TaskAnswer(items=items, trouble=done.trouble or "")


def repair_run(task: Task, settings: Settings, work: Work) -> TaskAnswer:
    """Repair what is known to be damaged in one run, under its lock."""
    done = repair(open_view(task.url, settings), work=work)
    failed = [
        item_of(task, Outcome.BAD, path=f.path, id=f.id, place=f.place, bytes=0, message=f.reason or "")
        for f in done.files
        if not f.repaired
    ]
    items = (*failed, *(_item_read(task, one) for one in done.checked))
    return TaskAnswer(items=items, trouble="; ".join(done.could_not_tell))


def replica_item(task: Task, one: Replicated) -> Item:
    """Return what is known of a checkpoint and the replica that a task is for."""
    return item_of(task, _OF_REPLICA.get(one.done, Outcome.PENDING), done=one.done, message=one.message or "")


def _item_read(task: Task, one: Checked | Reread) -> Item:
    """Return what is known of a checkpoint that was read."""
    known: dict[str, Any] = {name: getattr(one, name) for name in ("path", "id", "bytes", "seconds", "findings")}
    if one.outcome is Outcome.PENDING:
        known["message"] = next((f.message for f in one.findings if f.check == "reading"), "")
    return item_of(task, one.outcome, **known)


def _near(task: Task, settings: Settings) -> tuple[RunView, Checkpoint | None]:
    """Return a view of the run, and the task's checkpoint as it is now. Usually only this one is listed."""
    view = open_view(task.url, settings)
    view.list_near(task.path)
    checkpoint = view.checkpoint(task.path)
    if checkpoint is None or checkpoint.layout != task.layout:  # what lies further away decides
        view.forget()
        checkpoint = view.checkpoint(task.path)
    return view, checkpoint


def _scanned_before(storage: Storage, scans: Sequence[Scan], scanner: Scanner) -> Scanner:
    """Return a scanner that knows what the scans of the parts found. Anything else is read."""
    known: dict[str, ScannedFile] = {file.entry.key: file for scan in scans for file in scan.files}

    def scan(of: Storage, keys: Sequence[str], options: ScanOptions, progress: Progress | None) -> Scan:
        def is_enough(key: str) -> bool:
            wanted = (*options.sums, *(("md5",) if options.md5 else ()))
            return of is storage and key in known and all(known[key].digest(name) for name in wanted)

        missing = [key for key in keys if not is_enough(key)]
        read = scanner(of, missing, options, progress) if missing else Scan(files=(), seconds=0.0)
        found = known | {file.entry.key: file for file in read.files}
        seconds = read.seconds + sum(scan.seconds for scan in scans)
        return Scan(files=tuple(found[key] for key in keys), seconds=seconds)

    return scan
