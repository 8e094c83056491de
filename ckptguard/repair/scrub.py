"""Scrub: read again what has a verdict, so that rot is found while a whole copy still is somewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, ObjectMissingError, RecordsError
from ckptguard.incidents.events import incident_event, known_outcomes, news_in, verdict_event
from ckptguard.incidents.notify import Event
from ckptguard.incidents.record_bad_save import record_bad_save
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.kept import read_kept
from ckptguard.records.run import Run
from ckptguard.records.scrubs import KEPT, Scrub, Where, record_scrub
from ckptguard.repair.damaged_copy import record_kept_damage
from ckptguard.repair.scrub_plan import Due, Subset, scrub_plan
from ckptguard.runs.history import History, load_history
from ckptguard.runs.listing import find_checkpoint
from ckptguard.runs.results import Checked
from ckptguard.runs.settling import youngest_age
from ckptguard.scan import Progress, Scanner, scan_files
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.reread import ReadingStopped, Wrong, reread
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Finding, Outcome
from ckptguard.verify.checkpoint import Resave, verify_checkpoint

_GO_ON_WITHIN = 7 * 86400.0  # a reading that was cut short longer ago begins anew, where no other age is asked for
_SAVE_EVERY = 600.0  # seconds of reading that a kill may cost


class Reread(msgspec.Struct, frozen=True, kw_only=True):
    """One place that was read again: "place", or "kept" for the kept copy. `outcome` is that of the checkpoint, or of
    the copy; PENDING where another look has to tell."""

    path: str
    series: str
    step: int | None
    id: str
    place: str
    outcome: Outcome
    bytes: int
    seconds: float
    findings: tuple[Finding, ...] = ()


class Scrubbed(msgspec.Struct, frozen=True, kw_only=True):
    """What a scrub read. `left`: places that are due and were not read, because time was up. `next`: what would be
    read first now; `last`: what was read last, by the records; each with when that was. `could_not_tell` are sentences
    about what could not be read."""

    places: tuple[Reread, ...]
    left: int
    stopped: bool
    next: Due | None
    last: Due | None
    could_not_tell: tuple[str, ...] = ()


@dataclass
class Watcher:
    """Who is told of what a scrub does and finds, as a hook is told. `verify` judges what lies in place and differs
    from its manifest, and answers None where somebody else will; without it, it is verified, and an incident opened."""

    verify: Callable[[Checkpoint], Checked | None] | None = None
    tell: Callable[[Event], None] = lambda event: None
    begin: Callable[[Due], None] = lambda due: None
    end: Callable[[Reread], None] = lambda done: None
    source: str = "cli"


@dataclass
class _Work:
    run: Run
    settings: Settings
    watcher: Watcher
    scanner: Scanner
    pace: Pace
    md5: bool
    max_age: float | None
    history: History
    known: list[Scrub]
    troubles: list[str] = field(default_factory=list)


def scrub(
    run: Run,
    settings: Settings,
    *,
    max_duration: float | None = None,
    max_age: float | None = None,
    subset: Subset | None = None,
    leave_out: Container[Where] = (),
    rate: float | None = None,
    md5: bool = False,
    hold: Callable[[], None] = lambda: None,
    watcher: Watcher | None = None,
    scanner: Scanner = scan_files,
    progress: Progress | None = None,
) -> Scrubbed:
    """Read again what has a verdict, what nobody has read for the longest time first, in place and kept copies.

    `max_age`: leave out what was read within so many seconds. `max_duration`: stop after so many, also in the middle
    of a checkpoint, of which the next scrub reads the files that are left. `rate`: bytes a second. `hold` is called
    before each block: it may wait, and stops the scrub by raising ReadingStopped. What is cut short gets no verdict.

    What differs in place is judged by `watcher.verify`; a damaged kept copy counts no more. Both are incidents.
    CouldNotTellError if the run cannot be listed; trouble with one place is told in the answer.
    """
    now = time.time()
    history = load_history(run)
    plan, known = scrub_plan(run, history, now)
    due = [d for d in plan if max_age is None or d.last is None or not 0 <= now - d.last < max_age]
    due = [d for d in due if d.where not in leave_out and (subset is None or subset.holds(d))]
    deadline = math.inf if max_duration is None else time.monotonic() + max_duration

    def hold_on() -> None:
        hold()
        if time.monotonic() >= deadline:
            raise ReadingStopped

    pace = Pace(rate, hold_on, progress)
    work = _Work(run, settings, watcher or Watcher(), scanner, pace, md5, max_age, history, known)
    places: list[Reread] = []
    read = 0
    try:
        for one in due:
            hold_on()
            work.watcher.begin(one)
            done = _read(work, one)
            read += 1
            if done is not None:
                places.append(done)
                work.watcher.end(done)
    except ReadingStopped:
        pass
    after = [*due[read:], *(d for d in plan if d not in due), *(_read_at(d, now) for d in due[:read])]
    known_ones = [d for d in plan if d.last is not None]
    newest = max(known_ones, key=lambda d: d.last or 0.0, default=None)
    return Scrubbed(
        places=tuple(places),
        left=len(due) - read,
        stopped=read < len(due),
        next=next((d for d in after if d.where not in leave_out), None),
        last=_read_at(due[read - 1], now) if read else newest,
        could_not_tell=tuple(work.troubles),
    )


def _read_at(due: Due, now: float) -> Due:
    return msgspec.structs.replace(due, last=now, begun=None)


def _verify(work: _Work, checkpoint: Checkpoint) -> Checked | None:
    if work.watcher.verify is not None:
        return work.watcher.verify(checkpoint)
    known = known_outcomes(work.run)
    settings = work.settings.changed(digest="md5")  # it was asked for in this call
    checked = verify_checkpoint(work.run, checkpoint, settings, scanner=work.scanner, md5=work.md5, resave=Resave.WAIT)
    for one in news_in([checked], known):
        work.watcher.tell(verdict_event(work.run, one, source=work.watcher.source))
        try:
            record_bad_save(work.run, one, source=work.watcher.source)
        except CouldNotTellError as error:
            work.troubles.append(f"the incident of {one.path} could not be recorded: {error.message}")
    return checked


def _read(work: _Work, due: Due) -> Reread | None:
    """One place; None where there is nothing to say of it, or what could not be told is among the troubles."""
    began = time.monotonic()
    # One for each, over the same names: manifests are large, and must not add up.
    history = History(run=work.run, names=work.history.names, quarantined=work.history.quarantined)
    manifest = history.manifest(due.series, due.key)
    try:
        if manifest is None:
            raise RecordsError(f"the manifest of {due.id} of {due.series} is damaged: {due.path} cannot be compared")
        found = _read_kept(work, due, manifest) if due.place == KEPT else _read_place(work, due, manifest, history)
    except ObjectMissingError:
        return None  # rotated away, or released, under our hands
    except (BusyError, CouldNotTellError) as error:
        work.troubles.append(f"{due.path}: {error.message}")
        return None
    if found is None:
        return None
    outcome, findings = found
    return Reread(
        path=due.path,
        series=due.series,
        step=due.key[0],
        id=due.id,
        place=due.place,
        outcome=outcome,
        bytes=manifest.bytes,
        seconds=round(time.monotonic() - began, 3),
        findings=findings,
    )


def _read_place(
    work: _Work, due: Due, manifest: Manifest, history: History
) -> tuple[Outcome, tuple[Finding, ...]] | None:
    checkpoint = due.checkpoint
    assert checkpoint is not None
    if history.current(due.series, due.key[0], due.path) != due.key:
        return None  # another generation by now, which has no verdict or was read since
    age = youngest_age(checkpoint)
    if age is not None and age < work.settings.settle and not LAYOUTS[checkpoint.layout].sealed_by_writer:
        return None  # it is being written: a verdict of its own is pending
    reading, wrong = _differing(work, due, manifest, "")
    verdict = history.verdict(due.series, due.key)
    if wrong is None:
        _record(work, due, reading)
        return (verdict.outcome if verdict is not None else Outcome.PENDING), ()
    present = find_checkpoint(work.run, due.path)
    if present is None:
        return None  # all of it is gone, which is no alarm
    checked = _verify(work, present)
    if checked is None:
        return Outcome.PENDING, ()  # it is read again, unless a verdict comes of it
    _record(work, due, reading)
    if checked.id == due.id and checked.outcome is not Outcome.BAD:
        work.troubles.append(_twice(wrong))
    return checked.outcome, checked.findings


def _read_kept(work: _Work, due: Due, manifest: Manifest) -> tuple[Outcome, tuple[Finding, ...]] | None:
    copy = read_kept(work.run, due.series, *due.key)
    if copy is None:
        return None
    reading, wrong = _differing(work, due, manifest, copy.folder + "/")
    if wrong is not None:
        sealed = manifest.file(wrong.file)
        assert sealed is not None
        again = reread(work.run.records, copy.key(wrong.file), sealed, work.pace)
        if again is None:
            work.troubles.append(_twice(wrong))
        else:
            findings, incident = record_kept_damage(work.run, copy, manifest, [again], source=work.watcher.source)
            if not findings:
                return None  # released meanwhile
            if incident is not None:
                work.watcher.tell(incident_event(work.run, incident))
            return Outcome.BAD, findings
    _record(work, due, reading)
    return Outcome.GOOD, ()


def _twice(wrong: Wrong) -> str:
    return (
        f"{wrong.file} was not as it was sealed when it was read first, and is when it was read again: look after the "
        "disk and the memory"
    )


def _differing(work: _Work, due: Due, manifest: Manifest, prefix: str) -> tuple[Scrub, Wrong | None]:
    """The first file that is not as it was sealed, after which no more is read, and the reading to be recorded. One
    that is stopped is recorded so far, and the next one goes on with the file at hand."""
    storage = work.run.records if prefix else work.run.storage
    began, done, count = float(int(time.time())), 0, len(manifest.files)
    keep = work.max_age or _GO_ON_WITHIN
    if due.begun is not None and due.begun.files == count and 0 <= began - due.begun.began < keep:
        began, done = due.begun.began, due.begun.done
    reading = Scrub(
        series=due.series,
        step=due.key[0],
        generation=due.key[1],
        place=due.place,
        began=began,
        done=done,
        files=count,
    )
    first, saved = done, time.monotonic()
    try:
        for file in manifest.files[first:]:
            wrong = reread(storage, prefix + file.path, file, work.pace, md5=work.md5)
            if wrong is not None:
                return msgspec.structs.replace(reading, done=count), wrong
            done += 1
            if time.monotonic() - saved > _SAVE_EVERY and done < count:
                _record(work, due, msgspec.structs.replace(reading, done=done))
                saved = time.monotonic()
    except (ReadingStopped, KeyboardInterrupt):
        if done > first:
            _record(work, due, msgspec.structs.replace(reading, done=done))
        raise
    return msgspec.structs.replace(reading, done=count), None


def _record(work: _Work, due: Due, reading: Scrub) -> None:
    digests = ("blake3", "md5") if work.md5 else ("blake3",)
    try:
        record_scrub(work.run, reading, digests=digests, before=work.known)
    except CouldNotTellError as error:  # a read-only run, a full disk: what was read was read all the same
        work.troubles.append(f"it could not be recorded that {due.path} was read: {error.message}")
