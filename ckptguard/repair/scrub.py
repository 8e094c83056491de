"""Scrub: read again what has a verdict, so that rot is found while a whole copy still is somewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, ObjectMissingError, RecordsError
from ckptguard.incidents.events import incident_event, news_in, verdict_event
from ckptguard.incidents.notify import Event
from ckptguard.incidents.open_and_close import record_bad_save
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.kept import read_kept
from ckptguard.records.manifests import read_manifest
from ckptguard.records.scrubs import KEPT, Scrub, Where, record_scrub
from ckptguard.repair.damaged_copy import record_kept_damage
from ckptguard.repair.scrub_plan import Due, Subset, scrub_plan
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import youngest_age
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.reread import ReadingStopped, WrongFile, reread
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Finding, Outcome
from ckptguard.verify.checkpoint import Resave, Verification, verify_checkpoint

_GO_ON_WITHIN = 7 * 86400.0  # a reading that was cut short longer ago begins anew, where no other age is asked for
_SAVE_EVERY = 600.0  # seconds of reading that a kill may cost

_Found = tuple[Outcome, tuple[Finding, ...]]


class ScrubOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a scrub reads, and for how long. `max_age`: what was read within so many seconds is left out, and so is
    what `leave_out` names. `max_duration`: it ends after so many seconds, also in the middle of a checkpoint."""

    max_duration: float | None = None
    max_age: float | None = None
    subset: Subset | None = None
    leave_out: Container[Where] = frozenset()
    md5: bool = False


class Reread(msgspec.Struct, frozen=True):
    """One place that was read again: "place", or "kept" for the kept copy. `outcome` is that of the checkpoint, or of
    the copy; PENDING where another look has to tell."""

    path: str
    id: CheckpointId
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
class ScrubListener:
    """Who is told of what a scrub does and finds, as a hook is told. `verify` judges what lies in place and differs
    from its manifest, and answers None where somebody else will; without it, it is verified, and an incident opened."""

    verify: Callable[[Checkpoint], Checked | None] | None = None
    tell: Callable[[Event], None] = lambda event: None
    begin: Callable[[Due], None] = lambda due: None
    end: Callable[[Reread], None] = lambda done: None
    source: str = "cli"


@dataclass
class _Scrub:
    """One scrub: what it may do, and what it knows so far."""

    view: RunView
    order: ScrubOrder
    watcher: ScrubListener
    work: Work
    pace: Pace
    known: list[Scrub]
    troubles: list[str] = field(default_factory=list)


ALL = ScrubOrder()


def scrub(
    view: RunView,
    order: ScrubOrder = ALL,
    *,
    work: Work = PLAIN,
    watcher: ScrubListener | None = None,
    hold: Callable[[], None] = lambda: None,
) -> Scrubbed:
    """Read again what has a verdict, what nobody has read for the longest time first, in place and kept copies.

    The next scrub goes on where this one ended: of a checkpoint it reads the files that are left. `hold` is called
    before each block: it may wait, and stops the scrub by raising ReadingStopped. What is cut short gets no verdict.

    What differs in place is judged by `watcher.verify`; a damaged kept copy counts no more. Both are incidents.
    CouldNotTellError if the run cannot be listed; trouble with one place is told in the answer.
    """
    if view.settings.digest != "md5":  # which says what is read at first sight; here it was asked for in this call
        view = RunView(view.run, view.settings.changed(digest="md5"))
    now = time.time()
    plan, known = scrub_plan(view, now)
    due = [one for one in plan if _is_due(one, order, now)]
    deadline = math.inf if order.max_duration is None else time.monotonic() + order.max_duration

    def hold_on() -> None:
        hold()
        if work.is_stopped() or time.monotonic() >= deadline:
            raise ReadingStopped

    pace = Pace(work.rate, hold_on, work.progress)
    this = _Scrub(view, order, watcher or ScrubListener(), work, pace, known)
    places: list[Reread] = []
    read = 0
    try:
        for one in due:
            hold_on()
            this.watcher.begin(one)
            done = _read(this, one)
            read += 1
            if done is not None:
                places.append(done)
                this.watcher.end(done)
    except ReadingStopped:
        pass
    taken = {one.where for one in due}
    after = [*due[read:], *(d for d in plan if d.where not in taken), *(_read_at(d, now) for d in due[:read])]
    newest = max((d for d in plan if d.last is not None), key=lambda d: d.last or 0.0, default=None)
    return Scrubbed(
        places=tuple(places),
        left=len(due) - read,
        stopped=read < len(due),
        next=next((d for d in after if d.where not in order.leave_out), None),
        last=_read_at(due[read - 1], now) if read else newest,
        could_not_tell=tuple(this.troubles),
    )


def _is_due(one: Due, order: ScrubOrder, now: float) -> bool:
    if one.where in order.leave_out or (order.subset is not None and not order.subset.holds(one)):
        return False
    return order.max_age is None or one.last is None or not 0 <= now - one.last < order.max_age


def _read_at(due: Due, now: float) -> Due:
    return msgspec.structs.replace(due, last=now, begun=None)


def _verify(this: _Scrub, checkpoint: Checkpoint) -> Checked | None:
    if this.watcher.verify is not None:
        return this.watcher.verify(checkpoint)
    view, source = this.view, this.watcher.source
    standings = view.history.standings(checkpoint.series)
    known = {(id.series, str(id)): standing.outcome for id, standing in standings.items()}
    how = Verification(md5=this.order.md5, resave=Resave.WAIT)
    checked = verify_checkpoint(view, checkpoint, how, work=Work(scanner=this.work.scanner))
    for one in news_in([checked], known):
        this.watcher.tell(verdict_event(view.run, one, source=source))
        try:
            record_bad_save(view.run, one, source=source)
        except CouldNotTellError as error:
            this.troubles.append(f"the incident of {one.path} could not be recorded: {error.message}")
    return checked


def _read(this: _Scrub, due: Due) -> Reread | None:
    """One place; None where there is nothing to say of it, or what could not be told is among the troubles."""
    began = time.monotonic()
    try:
        this.view.refresh(due.id.series)  # a scrub takes hours
        manifest = _manifest(this, due)
        found = _read_kept(this, due, manifest) if due.place == KEPT else _read_place(this, due, manifest)
    except ObjectMissingError:
        return None  # rotated away, or released, under our hands
    except (BusyError, CouldNotTellError) as error:
        this.troubles.append(f"{due.path}: {error.message}")
        return None
    if found is None:
        return None
    seconds, (outcome, findings) = round(time.monotonic() - began, 3), found
    return Reread(due.path, due.id, due.place, outcome, manifest.bytes, seconds, findings)


def _manifest(this: _Scrub, due: Due) -> Manifest:
    """The manifest to hold a place against. It is not remembered: manifests are large, and must not add up."""
    with contextlib.suppress(RecordsError):
        manifest = read_manifest(this.view.run, due.id)
        if manifest is not None:
            return manifest
    raise RecordsError(f"the manifest of {due.id} of {due.id.series} is damaged: {due.path} cannot be compared")


def _is_current(view: RunView, due: Due, manifest: Manifest) -> bool:
    """Whether this generation should lie in place. The newest one of its step does, if that is its path: then no other
    manifest is read for it."""
    history, id = view.history, due.id
    newest = history.generations(id.series, id.step)[-1:] == [id] and not history.is_quarantined(id)
    return (newest and manifest.path == due.path) or history.current(id.series, id.step, due.path) == id


def _read_place(this: _Scrub, due: Due, manifest: Manifest) -> _Found | None:
    checkpoint, view = due.checkpoint, this.view
    assert checkpoint is not None
    if not _is_current(view, due, manifest):
        return None  # another generation by now, which has no verdict or was read since
    age = youngest_age(checkpoint)
    if age is not None and age < view.settings.settle and not LAYOUTS[checkpoint.layout].sealed_by_writer:
        return None  # it is being written: a verdict of its own is pending
    reading, wrong = _differing(this, due, manifest, "")
    verdict = view.history.verdict(due.id)
    if wrong is None:
        _record(this, due, reading)
        return (verdict.outcome if verdict is not None else Outcome.PENDING), ()
    present = view.look_again(due.path)
    if present is None:
        return None  # all of it is gone, which is no alarm
    checked = _verify(this, present)
    if checked is None:
        return Outcome.PENDING, ()  # it is read again, unless a verdict comes of it
    _record(this, due, reading)
    if checked.id == due.id and checked.outcome is not Outcome.BAD:
        this.troubles.append(_twice(wrong))
    return checked.outcome, checked.findings


def _read_kept(this: _Scrub, due: Due, manifest: Manifest) -> _Found | None:
    run = this.view.run
    copy = read_kept(run, due.id)
    if copy is None:
        return None
    reading, wrong = _differing(this, due, manifest, copy.folder + "/")
    sealed = manifest.file(wrong.file) if wrong is not None else None
    if wrong is not None and sealed is not None:
        again = reread(run.records, copy.key(wrong.file), sealed, this.pace)
        if again is not None:
            findings, incident = record_kept_damage(this.view, copy, manifest, [again], source=this.watcher.source)
            if incident is not None:
                this.watcher.tell(incident_event(run, incident))
            return (Outcome.BAD, findings) if findings else None  # None: released meanwhile
        this.troubles.append(_twice(wrong))
    _record(this, due, reading)
    return Outcome.GOOD, ()


def _twice(wrong: WrongFile) -> str:
    return (
        f"{wrong.file} was not as it was sealed when it was read first, and is when it was read again: look after the "
        "disk and the memory"
    )


def _differing(this: _Scrub, due: Due, manifest: Manifest, prefix: str) -> tuple[Scrub, WrongFile | None]:
    """The first file that is not as it was sealed, after which no more is read, and the reading to be recorded. One
    that is stopped is recorded so far, and the next one goes on with the file at hand."""
    storage = this.view.run.records if prefix else this.view.run.storage
    began, done, count = float(int(time.time())), 0, len(manifest.files)
    keep = this.order.max_age or _GO_ON_WITHIN
    if due.begun is not None and due.begun.files == count and 0 <= began - due.begun.began < keep:
        began, done = due.begun.began, due.begun.done
    reading = Scrub(id=due.id, place=due.place, began=began, done=done, files=count)
    first, saved = done, time.monotonic()
    try:
        for file in manifest.files[first:]:
            wrong = reread(storage, prefix + file.path, file, this.pace, md5=this.order.md5)
            if wrong is not None:
                return msgspec.structs.replace(reading, done=count), wrong
            done += 1
            if time.monotonic() - saved > _SAVE_EVERY and done < count:
                _record(this, due, msgspec.structs.replace(reading, done=done))
                saved = time.monotonic()
    except (ReadingStopped, KeyboardInterrupt):
        if done > first:
            _record(this, due, msgspec.structs.replace(reading, done=done))
        raise
    return msgspec.structs.replace(reading, done=count), None


def _record(this: _Scrub, due: Due, reading: Scrub) -> None:
    digests = ("blake3", "md5") if this.order.md5 else ("blake3",)
    try:
        record_scrub(this.view.run, reading, digests=digests, before=this.known)
    except CouldNotTellError as error:  # a read-only run, a full disk: what was read was read all the same
        this.troubles.append(f"it could not be recorded that {due.path} was read: {error.message}")
