"""Scrub: read again what has a verdict, so that rot is found while a whole copy still is somewhere."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, ObjectMissingError, RecordsError, SettingsError
from ckptguard.keep.copies import shares_place
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.manifests import read_manifest
from ckptguard.records.scrubs import (
    IN_PLACE,
    KEPT,
    Scrub,
    Where,
    forget_scrubs,
    newest_scrubs,
    read_scrubs,
    record_scrub,
)
from ckptguard.records.who_and_when import seconds_of
from ckptguard.repair.one_place import record_kept_damage
from ckptguard.reporting.notify import Event, incident_event, news_in, verdict_event
from ckptguard.reporting.open_and_close import record_bad_save
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import youngest_age
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.reread import ReadingStopped, WrongFile, reread
from ckptguard.values.ids import CheckpointId, Step
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Finding, Outcome
from ckptguard.verification.checkpoint import Resave, Verification, verify_checkpoint

_GO_ON_WITHIN = 7 * 86400.0  # a reading that was cut short longer ago begins anew, where no other age is asked for
_SAVE_EVERY = 600.0  # seconds of reading that a kill may cost
_TWICE = (
    "was not as it was sealed when it was read first, and is when it was read again: look after the disk and the memory"
)
_Found = tuple[Outcome, tuple[Finding, ...]]


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one generation that has a verdict. `last`: when a reading of all of it began, in seconds since
    1970; None where that is not known. `begun`: a reading that was cut short. `checkpoint` is what lies in place."""

    id: CheckpointId
    place: str
    path: str
    last: float | None = None
    begun: Scrub | None = None
    checkpoint: Checkpoint | None = None

    @property
    def where(self) -> Where:
        """What is read."""
        return self.id, self.place


class Subset(msgspec.Struct, frozen=True):
    """The `number`-th of `of` parts of all checkpoints; each is always in the same part."""

    number: int
    of: int

    def holds(self, due: Due) -> bool:
        """True if a generation is in this part."""
        digest = hashlib.sha256(f"{due.id.series}/{due.id}".encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") % self.of == self.number - 1


def parse_subset(text: str) -> Subset:
    """``n/t``. SettingsError."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, of = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= of:
        raise SettingsError(f"{text!r} is no subset", hint="say 1/7, 2/7 ... 7/7")
    return Subset(number, of)


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
    plan, known = _plan(view, now)
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
    read_now = [msgspec.structs.replace(d, last=now, begun=None) for d in due[:read]]
    after = [*due[read:], *(d for d in plan if d.where not in taken), *read_now]
    newest = max((d for d in plan if d.last is not None), key=lambda d: d.last or 0.0, default=None)
    return Scrubbed(
        places=tuple(places),
        left=len(due) - read,
        stopped=read < len(due),
        next=next((d for d in after if d.where not in order.leave_out), None),
        last=read_now[-1] if read_now else newest,
        could_not_tell=tuple(this.troubles),
    )


def _is_due(one: Due, order: ScrubOrder, now: float) -> bool:
    if one.where in order.leave_out or (order.subset is not None and not order.subset.holds(one)):
        return False
    return order.max_age is None or one.last is None or not 0 <= now - one.last < order.max_age


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
    """True if this generation should lie in place. Of the newest one of its step no other manifest is read for it."""
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
        this.troubles.append(f"{wrong.file} {_TWICE}")
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
        this.troubles.append(f"{wrong.file} {_TWICE}")
    _record(this, due, reading)
    return Outcome.GOOD, ()


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


def _plan(view: RunView, now: float) -> tuple[list[Due], list[Scrub]]:
    """All places of generations with a verdict, the one that nobody has read for the longest time first, and the
    records of readings. Records of what is gone are removed. CouldNotTellError if the run cannot be listed."""
    scrubs = read_scrubs(view.run)
    newest, whole = newest_scrubs(scrubs, now), newest_scrubs([scrub for scrub in scrubs if scrub.is_whole], now)
    places = [*_in_place(view), *_kept(view)]
    here = {due.where for due in places}
    forget_scrubs(view.run, [scrub for scrub in scrubs if scrub.where not in here])
    found = [_dated(view, due, newest.get(due.where), whole.get(due.where)) for due in places]
    found.sort(key=lambda due: (due.last is not None, due.last or 0.0, due.id.series, due.id.order, due.place))
    return found, [scrub for scrub in scrubs if scrub.where in here]


def _in_place(view: RunView) -> Iterator[Due]:
    history = view.history
    newest: dict[tuple[str, Step], CheckpointId] = {}
    for series in history.names:
        for id in history.standings(series):
            known = newest.get((series, id.step))
            if not history.is_quarantined(id) and (known is None or known.generation < id.generation):
                newest[series, id.step] = id
    for checkpoint in view.checkpoints:
        # By names alone: a run of thousands has gigabytes of manifests. Which generation it is, is looked at again.
        there = newest.get((checkpoint.series, checkpoint.step))
        if there is not None and there in history.sealed(checkpoint.series):
            yield Due(id=there, place=IN_PLACE, path=checkpoint.path, checkpoint=checkpoint)


def _kept(view: RunView) -> Iterator[Due]:
    """Kept copies with bytes of their own: links are read in place, under their other name."""
    for id in list_kept(view.run):
        copy = read_kept(view.run, id)
        if copy is not None and view.history.has_verdict(id) and not shares_place(view.run, copy, copy.files):
            yield Due(id=id, place=KEPT, path=copy.path, last=seconds_of(copy.kept_at))


def _dated(view: RunView, due: Due, newest: Scrub | None, whole: Scrub | None) -> Due:
    """With what is known of readings: of the newest one, and of the newest whole one."""
    since, standing = due.last, view.history.standings(due.id.series).get(due.id)
    if (whole is None and since is None) or (standing is not None and standing.outcome is not Outcome.GOOD):
        verdict = view.history.verdict(due.id)
        since = seconds_of(verdict.checked_at) if verdict is not None else None
    times = [time for time in (whole.began if whole is not None else None, since) if time is not None]
    begun = newest if newest is not None and not newest.is_whole else None
    return msgspec.structs.replace(due, last=max(times, default=None), begun=begun)
