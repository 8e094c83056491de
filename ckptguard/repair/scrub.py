"""Scrub: read verified checkpoints again, to find decay while a whole copy still exists."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ckptguard.decisions.run_summary import last_read
from ckptguard.errors import BusyError, CouldNotTellError, ObjectMissingError, RecordsError
from ckptguard.keep.copies import shares_place
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.after_seal import late_md5_ids, read_late_md5s, record_late_md5s
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.manifests import read_manifest
from ckptguard.records.scrubs import (
    IN_PLACE,
    KEPT,
    Scrub,
    Where,
    forget_scrubs,
    newest_scrubs,
    read_md5s_so_far,
    read_scrubs,
    record_scrub,
)
from ckptguard.records.who_and_when import seconds_of
from ckptguard.repair.one_place import record_kept_damage
from ckptguard.reporting.channels import Tell
from ckptguard.reporting.events import incident_event, news_in, verdict_event
from ckptguard.reporting.open_and_close import record_bad_save
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.runs.settling import youngest_age
from ckptguard.runs.work import PLAIN, Work, noted
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.reread import ReadingStopped, WrongFile, reread
from ckptguard.values.ids import CheckpointId, Step
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Finding, Outcome
from ckptguard.verification.checkpoint import Resave, Verification, verify_checkpoint

_GO_ON_WITHIN = 7 * 86400.0  # an interrupted reading older than this starts again, if no other age is set
_SAVE_EVERY = 600.0  # seconds of reading that a kill may lose
_TWICE = "had wrong bytes when read the first time and right ones the second time: check the disk and the memory"
_NO_MD5S: Mapping[str, str] = {}
_Found = tuple[Outcome, tuple[Finding, ...]]


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one verified generation. `last`: when its last whole reading began, in seconds since 1970, or None.
    `begun` is an interrupted reading. `checkpoint` is what is in place."""

    id: CheckpointId
    place: str
    path: str
    last: float | None = None
    begun: Scrub | None = None
    checkpoint: Checkpoint | None = None

    @property
    def where(self) -> Where:
        """The id and the place."""
        return self.id, self.place


class ScrubOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a scrub reads, and for how long.

    - `max_age`: skip what was read within this many seconds; infinite: read nothing for its age.
    - `leave_out`: skip these places, too.
    - `max_duration`: stop after this many seconds, even inside a checkpoint.
    - `only`: this place alone.
    - `late_md5s`: after all that, read good saves without an MD5 on record, the oldest first, however young.
    """

    max_duration: float | None = None
    max_age: float | None = None
    leave_out: Container[Where] = frozenset()
    only: Where | None = None
    late_md5s: bool = False


class Reread(msgspec.Struct, frozen=True):
    """One place that was read again: "place", or "kept" for the kept copy. `outcome` is that of this place; PENDING
    means that it needs another check."""

    path: str
    id: CheckpointId
    place: str
    outcome: Outcome
    bytes: int
    seconds: float
    findings: tuple[Finding, ...] = ()


class Scrubbed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a scrub, `places` as they were read. `left` counts places that are due but were not read in time.

    `next` is what would be read first now, `last` what was read last. `could_not_tell` says what could not be read.
    """

    places: tuple[Reread, ...]
    left: int
    stopped: bool
    next: Due | None
    last: Due | None
    could_not_tell: tuple[str, ...] = ()


@dataclass
class ScrubListener:
    """Receives what a scrub does and finds. `verify` judges files in place that differ from their manifest, or returns
    None if another part will. Without it they are verified here, and an incident is opened. `end` gets None if a place
    has no result."""

    verify: Callable[[Checkpoint], Checked | None] | None = None
    tell: Tell = lambda run, event: None
    begin: Callable[[Due], None] = lambda due: None
    end: Callable[[Reread | None], None] = lambda done: None
    source: str = "cli"


@dataclass
class _Scrub:
    """The state of one scrub."""

    view: RunView
    order: ScrubOrder
    watcher: ScrubListener
    work: Work
    pace: Pace
    known: list[Scrub]
    troubles: list[str] = field(default_factory=list)


class _Md5s:
    """Takes the MD5s of a save that has none on record, in the reading that compares BLAKE3."""

    def __init__(self, view: RunView, id: CheckpointId, manifest: Manifest) -> None:
        lacks = view.settings.digest != "blake3" and any(file.md5 is None for file in manifest.files)
        self.wanted = lacks and not read_late_md5s(view.run, id)
        self.taken: dict[str, str] = {}
        self._hash = hashlib.md5(usedforsecurity=False)

    def begin(self) -> Callable[[bytes], None] | None:
        """Return what takes the blocks of the next file, or None."""
        self._hash = hashlib.md5(usedforsecurity=False)
        return self._hash.update if self.wanted else None

    def end(self, path: str) -> None:
        """Note the MD5 of that file, which was as sealed."""
        if self.wanted:
            self.taken[path] = self._hash.hexdigest()


ALL = ScrubOrder()


def scrub(
    view: RunView,
    order: ScrubOrder = ALL,
    *,
    work: Work = PLAIN,
    watcher: ScrubListener | None = None,
    hold: Callable[[], None] = lambda: None,
) -> Scrubbed:
    """Read verified checkpoints and kept copies again, those first that were not read for the longest time. The next
    scrub continues where this one ended. `hold` is called before each block: it may wait, or raise ReadingStopped to
    stop the scrub, which gives no verdict. Files in place that differ are judged by `watcher.verify`; a damaged kept
    copy no longer counts. Raises CouldNotTellError if the run cannot be listed; other problems are in the result."""
    now = time.time()
    plan, known = _plan(view, now, order.only)
    due = _due(view, plan, order, now)
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
            places += [] if done is None else [done]
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


def due_places(view: RunView, order: ScrubOrder = ALL) -> list[Due]:
    """Return what a scrub would read now, longest unread first. Raises CouldNotTellError."""
    now = time.time()
    return _due(view, _plan(view, now)[0], order, now)


def _due(view: RunView, plan: Sequence[Due], order: ScrubOrder, now: float) -> list[Due]:
    due = [one for one in plan if _is_due(one, order, now)]
    return [*due, *_without_md5(view, plan, order, {one.id for one in due})] if order.late_md5s else due


def _without_md5(view: RunView, plan: Sequence[Due], order: ScrubOrder, due: Container[CheckpointId]) -> list[Due]:
    """Return one place of each good save whose MD5 nobody took, unless it is read anyway. The oldest is first."""
    found: dict[CheckpointId, tuple[float, Due]] = {}
    taken: set[CheckpointId] | None = None
    for one in plan:
        if one.id in due or one.where in order.leave_out:
            continue
        sealed, judged = view.reader.sealed(one.id), view.reader.judged(one.id)
        if sealed is None or sealed.has_md5 or judged is None or sealed_outcome(judged) is not Outcome.GOOD:
            continue
        if judged.place_damaged and one.place == IN_PLACE:
            continue
        taken = late_md5_ids(view.run) if taken is None else taken
        if one.id not in taken and (one.id not in found or one.place == IN_PLACE):
            found[one.id] = sealed.saved_at or 0.0, one
    return [one for _, one in sorted(found.values(), key=lambda of: (of[0], of[1].id.order, of[1].id.series))]


def _is_due(one: Due, order: ScrubOrder, now: float) -> bool:
    if one.where in order.leave_out:
        return False
    if order.max_age == math.inf:
        return False
    return order.max_age is None or one.last is None or not 0 <= now - one.last < order.max_age


def _verify(this: _Scrub, checkpoint: Checkpoint) -> Checked | None:
    if this.watcher.verify is not None:
        return this.watcher.verify(checkpoint)
    view, source = this.view, this.watcher.source
    current_verdicts = view.history.current_verdicts(checkpoint.series)
    known = {(id.series, str(id)): current_verdict.outcome for id, current_verdict in current_verdicts.items()}
    how = Verification(md5=False, resave=Resave.WAIT)
    checked = verify_checkpoint(view, checkpoint, how, work=Work(scanner=this.work.scanner))
    for one in news_in([checked], known):
        this.watcher.tell(view.run, verdict_event(view.run, one, source=source))
        with noted(this.troubles, f"the incident of {one.path} could not be recorded"):
            record_bad_save(view.run, one, source=source)
    return checked


def _read(this: _Scrub, due: Due) -> Reread | None:
    """Read one place. None if there is nothing to report, or the problem is in the list of troubles."""
    began = time.monotonic()
    try:
        this.view.refresh(due.id.series)  # a scrub takes hours
        manifest = _manifest(this, due)
        found = _read_kept(this, due, manifest) if due.place == KEPT else _read_place(this, due, manifest)
    except ObjectMissingError:
        return None  # deleted or released meanwhile
    except (BusyError, CouldNotTellError) as error:
        this.troubles.append(f"{due.path}: {error.message}")
        return None
    if found is None:
        return None
    seconds, (outcome, findings) = round(time.monotonic() - began, 3), found
    return Reread(due.path, due.id, due.place, outcome, manifest.bytes, seconds, findings)


def _manifest(this: _Scrub, due: Due) -> Manifest:
    """Return the manifest to compare a place with. It is not kept in memory, because manifests are large."""
    with contextlib.suppress(RecordsError):
        manifest = read_manifest(this.view.run, due.id)
        if manifest is not None:
            return manifest
    raise RecordsError(f"the manifest of {due.id} of {due.id.series} is damaged: {due.path} cannot be compared")


def _is_current(view: RunView, due: Due, manifest: Manifest) -> bool:
    """True if this generation should be in place. For the newest of its step this reads no other manifest."""
    history, id = view.history, due.id
    newest = history.generations(id.series, id.step)[-1:] == [id] and not history.is_quarantined(id)
    return (newest and manifest.path == due.path) or history.current(id.series, id.step, due.path) == id


def _read_place(this: _Scrub, due: Due, manifest: Manifest) -> _Found | None:
    checkpoint, view = due.checkpoint, this.view
    assert checkpoint is not None
    if not _is_current(view, due, manifest):
        return None  # another generation now, which has no verdict or was read since
    age = youngest_age(checkpoint)
    if age is not None and age < view.settings.settle and not LAYOUTS[checkpoint.layout].sealed_by_writer:
        return None  # it is being written, and its own verdict is pending
    reading, wrong = _differing(this, due, manifest, "")
    verdict = view.history.verdict(due.id)
    if wrong is None:
        _record(this, due, reading)
        return (verdict.outcome if verdict is not None else Outcome.PENDING), ()
    present = view.look_again(due.path)
    if present is None:
        return None  # all of it is gone, which is no damage
    checked = _verify(this, present)
    if checked is None:
        return Outcome.PENDING, ()  # it is read again, unless a verdict follows
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
                this.watcher.tell(run, incident_event(run, incident))
            return (Outcome.BAD, findings) if findings else None  # None: released meanwhile
        this.troubles.append(f"{wrong.file} {_TWICE}")
    _record(this, due, reading)
    return Outcome.GOOD, ()


def _differing(this: _Scrub, due: Due, manifest: Manifest, prefix: str) -> tuple[Scrub, WrongFile | None]:
    """Return the first file that differs from the seal, and the reading to record. It stops at that file. A stopped
    reading is recorded as far as it got, and the next one continues with the current file."""
    storage = this.view.run.records if prefix else this.view.run.storage
    began, done, count = float(int(time.time())), 0, len(manifest.files)
    keep = this.order.max_age or _GO_ON_WITHIN
    if due.begun is not None and due.begun.files == count and 0 <= began - due.begun.began < keep:
        began, done = due.begun.began, due.begun.done
    reading = Scrub(id=due.id, place=due.place, began=began, done=done, files=count)
    md5s = _Md5s(this.view, due.id, manifest)
    if done and due.begun is not None and md5s.wanted:
        md5s.taken = read_md5s_so_far(this.view.run, due.begun)
    first, saved = done, time.monotonic()
    try:
        for file in manifest.files[first:]:
            wrong = reread(storage, prefix + file.path, file, this.pace, md5s.begin())
            if wrong is not None:
                return msgspec.structs.replace(reading, done=count), wrong
            md5s.end(file.path)
            done += 1
            if time.monotonic() - saved > _SAVE_EVERY and done < count:
                _record(this, due, msgspec.structs.replace(reading, done=done), md5s.taken)
                saved = time.monotonic()
    except (ReadingStopped, KeyboardInterrupt):
        if done > first:
            _record(this, due, msgspec.structs.replace(reading, done=done), md5s.taken)
        raise
    _record_md5s(this, due, manifest, md5s.taken)
    return msgspec.structs.replace(reading, done=count), None


def _record(this: _Scrub, due: Due, reading: Scrub, md5s: Mapping[str, str] = _NO_MD5S) -> None:
    with noted(this.troubles, f"the reading of {due.path} could not be recorded"):  # it still counts
        record_scrub(this.view.run, reading, before=this.known, md5s=md5s)


def _record_md5s(this: _Scrub, due: Due, manifest: Manifest, taken: Mapping[str, str]) -> None:
    """Record the MD5s of a whole reading in which all was as sealed. Of a part they would be lost, and read again."""
    if not taken or any(file.path not in taken for file in manifest.files):
        return
    with noted(this.troubles, f"the MD5 of {due.path} could not be recorded"):
        record_late_md5s(this.view.run, due.id, {file.path: taken[file.path] for file in manifest.files})


def _plan(view: RunView, now: float, only: Where | None = None) -> tuple[list[Due], list[Scrub]]:
    """Return all places of verified generations, longest unread first, and the records of readings. Records of what is
    gone are removed. Raises CouldNotTellError if the run cannot be listed."""
    scrubs = read_scrubs(view.run)
    newest, whole = newest_scrubs(scrubs, now), newest_scrubs([scrub for scrub in scrubs if scrub.is_whole], now)
    places = [*_in_place(view), *_kept(view)]
    here = {due.where for due in places}
    forget_scrubs(view.run, [scrub for scrub in scrubs if scrub.where not in here])
    places = [due for due in places if only in (None, due.where)]
    found = [_dated(view, due, newest.get(due.where), whole.get(due.where)) for due in places]
    found.sort(key=lambda due: (due.last is not None, due.last or 0.0, due.id.series, due.id.order, due.place))
    return found, [scrub for scrub in scrubs if scrub.where in here]


def _in_place(view: RunView) -> Iterator[Due]:
    history = view.history
    newest: dict[tuple[str, Step], CheckpointId] = {}
    for series in history.names:
        for id in history.current_verdicts(series):
            known = newest.get((series, id.step))
            if not history.is_quarantined(id) and (known is None or known.generation < id.generation):
                newest[series, id.step] = id
    for checkpoint in view.checkpoints:
        # By names alone: thousands of manifests are gigabytes. The generation is checked again before reading.
        there = newest.get((checkpoint.series, checkpoint.step))
        if there is not None and history.is_sealed(there) and checkpoint.unread is None:
            yield Due(id=there, place=IN_PLACE, path=checkpoint.path, checkpoint=checkpoint)


def _kept(view: RunView) -> Iterator[Due]:
    """Yield the kept copies that are full copies. Links are read in place."""
    for id in list_kept(view.run):
        copy = read_kept(view.run, id)
        if copy is not None and view.history.has_verdict(id) and not shares_place(view.run, copy, copy.files):
            yield Due(id=id, place=KEPT, path=copy.path, last=seconds_of(copy.kept_at))


def _dated(view: RunView, due: Due, newest: Scrub | None, whole: Scrub | None) -> Due:
    """Add the times of the newest reading and the newest whole reading."""
    current_verdict, read = view.history.current_verdict(due.id), None if whole is None else whole.began
    good = current_verdict is None or current_verdict.outcome is Outcome.GOOD
    verdict = view.history.verdict(due.id) if not good or (read is None and due.last is None) else None
    judged = seconds_of(verdict.checked_at) if verdict is not None else None
    begun = newest if newest is not None and not newest.is_whole else None
    return msgspec.structs.replace(due, last=last_read(judged, read, due.last, good=good), begun=begun)
