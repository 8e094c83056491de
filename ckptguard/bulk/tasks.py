"""The tasks: verify, scrub or replicate one checkpoint, scan a part of a large one, repair one run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckptguard.bulk.messages import OF_REPLICA, Answer, Item, Planned, Task, item_of
from ckptguard.errors import CkptguardError
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import ScrubListener, ScrubOrder, scrub
from ckptguard.replicas.replicate import replicate
from ckptguard.reporting.channels import Event
from ckptguard.reporting.events import verdict_event
from ckptguard.reporting.open_and_close import record_bad_save
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView, open_view
from ckptguard.runs.settling import wait_until_quiet
from ckptguard.runs.work import Work
from ckptguard.scan import Progress, Scanner, ScanOptions
from ckptguard.scan.result import Scan, ScannedFile
from ckptguard.storage import Storage
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import judge_in_run
from ckptguard.verification.found_sums import find_sums
from ckptguard.verification.selection import Selection

_SOURCE = "cli"


def verify_one(task: Task, settings: Settings, work: Work) -> Answer:
    """Verify one checkpoint, record the verdict, and open an incident if it is bad. `task.scans` is not read again."""
    planned = _planned(task)
    view, checkpoint = _near(task, settings)
    if checkpoint is None:
        return Answer()  # the trainer or retention has removed it
    quiet: Checkpoint | None = checkpoint
    if not LAYOUTS[checkpoint.layout].sealed_by_writer:  # these are finished by a seal, not by time
        settle = settings.settle
        quiet = wait_until_quiet(checkpoint, lambda: view.look_again(planned.path), settle=settle, limit=2 * settle)
    if quiet is None:
        item = item_of(task, planned, Outcome.PENDING, message="it is still being written")
        return Answer(items=(item,))
    if task.scans:
        scanner = _scanned_before(view.run.storage, task.scans, work.scanner)
        work = msgspec.structs.replace(work, scanner=scanner)
    notes: list[str] = []
    found = judge_in_run(view, Selection(), None, notes, work)(quiet)
    events: list[Event] = []
    try:
        if record_bad_save(view.run, found, source=_SOURCE) is not None:
            events.append(verdict_event(view.run, found, source=_SOURCE))
    except CkptguardError as error:
        notes.append(f"the incident of {found.path} could not be recorded: {error.message}")
    return Answer(items=(_checked(task, found),), events=tuple(events), trouble="; ".join(notes))


def scan_part(task: Task, settings: Settings, work: Work) -> Answer:
    """Scan some files of a large checkpoint: every digest that its verification will ask for."""
    view, checkpoint = _near(task, settings)
    if checkpoint is None:
        return Answer(trouble="it was removed meanwhile")
    storage = view.run.storage
    sums = find_sums(storage, checkpoint, view.sum_lists_beside(checkpoint))
    return Answer(scan=work.scanner(storage, task.files, sums.added_to(ScanOptions()), work.progress))


def scrub_one(task: Task, settings: Settings, work: Work) -> Answer:
    """Read one place of a verified checkpoint again."""
    planned = _planned(task)
    assert planned.id is not None
    events: list[Event] = []
    order = ScrubOrder(only=(planned.id, planned.place))
    done = scrub(open_view(task.url, settings), order, work=work, watcher=ScrubListener(tell=events.append))
    items = (
        Item(
            run=task.url,
            path=one.path,
            id=one.id,
            place=one.place,
            outcome=one.outcome,
            bytes=one.bytes,
            seconds=one.seconds,
            findings=one.findings,
        )
        for one in done.places
    )
    return Answer(items=tuple(items), events=tuple(events), trouble="; ".join(done.could_not_tell))


def replicate_one(task: Task, settings: Settings, work: Work) -> Answer:
    """Send one checkpoint to one replica, and read it back from there."""
    planned = _planned(task)
    done = replicate(
        open_view(task.url, settings), planned.place, work=work, only=None if planned.id is None else [planned.id]
    )
    items = tuple(
        item_of(
            task,
            planned,
            OF_REPLICA.get(one.done, Outcome.PENDING),
            done=one.done,
            message=one.message or "",
        )
        for one in done.checkpoints
        if one.done != "gone"
    )
    return Answer(items=items, trouble=done.trouble or "")


def repair_run(task: Task, settings: Settings, work: Work) -> Answer:
    """Repair what is known to be damaged in one run, under its lock."""
    done = repair(open_view(task.url, settings), work=work)
    failed = [
        Item(run=task.url, path=f.path, id=f.id, place=f.place, outcome=Outcome.BAD, message=f.reason or "")
        for f in done.files
        if not f.repaired
    ]
    items = (*failed, *(_checked(task, one) for one in done.checked))
    return Answer(items=items, trouble="; ".join(done.could_not_tell))


def _planned(task: Task) -> Planned:
    assert task.planned is not None
    return task.planned


def _near(task: Task, settings: Settings) -> tuple[RunView, Checkpoint | None]:
    """Return a view of the run, and the planned checkpoint as it is now. Usually only this one is listed."""
    planned = _planned(task)
    view = open_view(task.url, settings)
    view.list_near(planned.path)
    checkpoint = view.checkpoint(planned.path)
    if checkpoint is None or checkpoint.layout != planned.layout:  # what lies further away decides
        view.forget()
        checkpoint = view.checkpoint(planned.path)
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


def _checked(task: Task, one: Checked) -> Item:
    message = next((f.message for f in one.findings if f.check == "reading"), "")
    return Item(
        run=task.url,
        path=one.path,
        id=one.id,
        outcome=one.outcome,
        bytes=one.bytes,
        seconds=one.seconds,
        findings=one.findings,
        message=message if one.outcome is Outcome.PENDING else "",
    )
