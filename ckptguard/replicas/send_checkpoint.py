"""Send one good checkpoint to another run of the same lineage: its files, its manifest, then a verdict after every byte
was read back. After an interruption a second call continues: whole files are not sent again."""

from __future__ import annotations

import contextlib
import functools
import shlex
import threading
import uuid
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptguard.errors import (
    BusyError,
    ChangedWhileReadError,
    CouldNotTellError,
    ObjectExistsError,
    ObjectMissingError,
    RecordsError,
)
from ckptguard.keep.quarantine import damaged_folder, quarantine
from ckptguard.records.kept import KeptCopy, commit_kept, kept_folder, read_kept
from ckptguard.records.manifests import manifest_key, write_manifest
from ckptguard.records.run import Run, read_record
from ckptguard.records.who_and_when import utc_now
from ckptguard.runs.file_signatures import as_reported, looks_as_read
from ckptguard.runs.find_known_good import Candidate
from ckptguard.runs.free_space import need_room
from ckptguard.runs.history import History
from ckptguard.runs.publish import Place, duplicate_within, for_each, move_within, publish_file
from ckptguard.runs.removal import remove_record, remove_wrong_copy
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.runs.work import Work
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.reread import read_back
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import File, Manifest, decode_manifest, identity
from ckptguard.values.record_formats import VERDICT
from ckptguard.values.record_text import decode_checked
from ckptguard.values.verdict import UNDERSTOOD, Facts, Finding, Outcome, Severity, Verdict, is_clearance
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.version import __version__

_TRIES = 2  # in case a source is readable at the second attempt, or a store corrupted what was sent
_CHECK = "replica"
_ARRIVED = "every byte was read back here and is as it was sealed"


class Replicated(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint and one replica. `sent` counts transferred bytes, and `shared` those that the replica had already
    in another checkpoint. `done` is one of:

    - "there", "would send", "failed", "sent": then every byte was read back there;
    - "raced": another process sealed it there first;
    - "gone": it was removed from the run meanwhile;
    - "damaged": the run has no whole copy of it, and nothing was sent.
    """

    path: str
    id: CheckpointId
    bytes: int
    done: str
    sent: int = 0
    shared: int = 0
    message: str | None = None


def replicated(candidate: Candidate, done: str, **more: Any) -> Replicated:
    """Return what was done about a checkpoint."""
    manifest = candidate.manifest
    return Replicated(path=manifest.path, id=candidate.id, bytes=manifest.bytes, done=done, **more)


@dataclass
class Sending:
    """The state of sending one checkpoint to the place `to`. `places` are its whole copies, best first. The pace ends
    all reading once it is `over`."""

    source: RunView
    target: RunView
    candidate: Candidate
    work: Work
    pace: Pace
    to: Place
    aside: bool  # as a kept copy, because its path belongs to another generation there
    places: list[Place]
    over: threading.Event
    twins: dict[object, str]  # the files of other checkpoints there, by their content
    sent: int = 0
    shared: int = 0
    claimed: dict[str, CheckpointId] | None = None  # the target's files that belong to other checkpoints
    lock: threading.Lock = field(default_factory=threading.Lock)  # for the changing fields above, and the views


def send_checkpoint(
    source: RunView, target: RunView, candidate: Candidate, *, work: Work, pace: Pace
) -> tuple[Replicated, Callable[[], None] | None]:
    """Make a known-good checkpoint of `source` one of `target`, too, under its own name.

    It is not good there before its verdict is given. Returns what was done, and the call that gives the verdict, if
    there is one to give.

    - Damage found in the source gets its verdict there, and is never sent.
    - An older generation at this path is quarantined after the new one arrived as a kept copy.
    - If the target has a verdict on it, missing or damaged files are sent again.

    The record names of its series are read again before the verdict, in both runs. Raises CouldNotTellError.
    """
    there, lies = _sealed_there(target, candidate)
    sending = _begin(source, target, candidate, lies, work, pace)
    _need_room(sending)
    wrong = send_files(sending)
    moved = {"sent": sending.sent, "shared": sending.shared}
    if wrong is not None:
        return replicated(candidate, "damaged", **moved, message=wrong), None
    if there is None:
        faster = _commit(sending, lies)
        if faster is not None:
            return replicated(candidate, "raced", **moved, message=faster), None
    elif sending.aside:
        _mark_kept(target.run, there)
    sealed_before, known = there is not None and not sending.aside, target.history.current_verdict(candidate.id)
    if there is not None and not any(moved.values()) and known is not None and known.outcome is Outcome.GOOD:
        if sealed_before and not _looks_as_judged(target, there):
            _give_verdict(sending, sealed_before=True)  # all of it was just read
        return replicated(candidate, "there"), None
    give_verdict = functools.partial(_give_verdict, sending, sealed_before=sealed_before)
    return replicated(candidate, "sent", **moved), give_verdict


def _sealed_there(target: RunView, candidate: Candidate) -> tuple[Manifest | None, CheckpointId | None]:
    """Return the target's manifest of a checkpoint, if it is readable, and which generation its path belongs to."""
    id = candidate.id
    there = manifest_there(target, candidate)
    if there is None and target.history.is_sealed(id):
        remove_record(target.run, manifest_key(id))  # an unreadable manifest seals nothing
        target.refresh(id.series)
    return there, target.history.current(id.series, id.step, candidate.manifest.path)


def _begin(
    source: RunView, target: RunView, candidate: Candidate, lies: CheckpointId | None, work: Work, pace: Pace
) -> Sending:
    id = candidate.id
    # The path belongs to the generation that is there, even if older ones of the step miss their files.
    aside = lies not in (None, id) or read_kept(target.run, id) is not None
    places = [Place(source.run.storage)] if candidate.in_place else []
    if candidate.copy is not None:
        places.append(Place(source.run.records, candidate.copy.folder + "/"))
    to, over = Place(target.run.storage), threading.Event()
    if aside:
        to = Place(target.run.records, kept_folder(id) + "/")
    twins = _twins(source, target, candidate)
    return Sending(source, target, candidate, work, pace.until(over), to, aside, places, over, twins)


def _twins(source: RunView, target: RunView, candidate: Candidate) -> dict[object, str]:
    """Map contents to where the target has them in the good checkpoints that are nearest to this one in its series.

    They are named by records that are known already. Nothing is trusted: what is made from one is read back. On a disk
    two neighbours never share bytes, so that one fault there does not damage all: their next neighbours do.
    """
    id, storage, wanted = candidate.id, target.run.storage, {_content(file) for file in candidate.manifest.files}
    known = target.history.current_verdicts(id.series).items()
    good = sorted(other.order for other, verdict in known if verdict.outcome is Outcome.GOOD and other != id)
    at = bisect_left(good, id.order)

    def files_of(orders: list[Any]) -> list[File]:
        manifests = (source.history.manifest(other) for other, _ in known if other.order in orders)
        return [f for one in manifests if one is not None for f in one.files if f.size and _content(f) in wanted]

    beside = files_of(good[max(at - 1, 0) : at + 1])
    if storage.root is None:
        return {_content(file): file.path for file in beside}
    taken = {entry.inode for file in beside if (entry := find_entry(storage, file.path)) is not None}
    far = ((file, find_entry(storage, file.path)) for file in files_of(good[max(at - 2, 0) : at + 2]))
    return {_content(file): file.path for file, entry in far if entry is not None and entry.inode not in taken}


def _content(file: File) -> object:
    """Return what is equal for equal bytes, wherever they are."""
    return identity((file,))[0][1:]


def _looks_as_judged(target: RunView, sealed: Manifest) -> bool:
    found = (find_entry(target.run.storage, file.path) for file in sealed.files)
    return looks_as_read([e for e in found if e is not None], sealed, target.history.verdict(sealed.id))


def has_arrived(target: RunView, candidate: Candidate) -> bool:
    """True if the target has a verdict on this checkpoint. Raises CouldNotTellError if the id means another one
    there."""
    return manifest_there(target, candidate) is not None and target.history.verdict(candidate.id) is not None


def manifest_there(target: RunView, candidate: Candidate) -> Manifest | None:
    """Return the target's manifest of this checkpoint, or None if it is missing or damaged. Raises CouldNotTellError if
    the target has another manifest with the same id."""
    id = candidate.id
    if not target.history.is_sealed(id):
        return None
    text = _whole_manifest(target.run, id)
    if text is None:
        return None
    there = decode_manifest(text)
    if there.id != id or identity(there.files) != identity(candidate.manifest.files):
        raise CouldNotTellError(
            f"{target.run.url} holds another {id} of {id.series}: the two runs have diverged",
            hint="replicate to another place",
        )
    return there


def _whole_manifest(target: Run, id: CheckpointId) -> bytes | None:
    """Return the text of a manifest unless it is damaged. A newer format is not damage."""
    text = read_record(target, manifest_key(id)) or b""
    with contextlib.suppress(RecordsError):
        decode_checked(text, dict[str, Any], "a manifest")
        return text
    return None


def _need_room(sending: Sending) -> None:
    """Raise StorageFullError before the first byte if the missing files do not fit."""
    if sending.to.storage.free_space() is None:
        return
    files = (file for file in sending.candidate.manifest.files if _twin_of(sending, file) is None)
    now = ((sending.to.entry(f.path), f.size) for f in files)
    missing = sum(size for entry, size in now if entry is None or entry.size != size)
    need_room(sending.to.storage, missing, f"the replica of {sending.candidate.answer.path}")


def _commit(sending: Sending, occupant: CheckpointId | None) -> str | None:
    """Seal it there. Returns a sentence if another process was first."""
    target, manifest, id = sending.target, sending.candidate.manifest, sending.candidate.id
    files = tuple(_as_described(file, sending.to, sending.aside) for file in manifest.files)
    nonce, saved = uuid.uuid4().hex, manifest.saved_at
    manifest = msgspec.structs.replace(manifest, files=files, nonce=nonce, first_saved_ns=saved)
    if sending.aside:
        _mark_kept(target.run, manifest)
    if occupant is not None and occupant.generation < id.generation:
        with contextlib.suppress(ObjectMissingError):
            quarantine(target, manifest.path, reason=f"its run has saved {manifest.path} again", suspect=False)
    try:
        write_manifest(target.run, manifest)
    except BusyError as error:
        target.refresh(id.series)
        return error.message
    if _whole_manifest(target.run, id) is None:
        raise CouldNotTellError(f"{target.run.url} does not hold the manifest that was written to it")
    return None


def _as_described(file: File, place: Place, aside: bool) -> File:
    """Describe the file as its new place reports it. A kept copy has no place in the run."""
    if aside:
        return msgspec.structs.replace(file, mtime_ns=None, inode=None, etag=None, ctime_ns=None)
    return as_reported(file, place.storage.stat(place.key(file.path)))


def _mark_kept(target: Run, manifest: Manifest) -> None:
    """Make what was sent aside count as the kept copy for the target's manifest."""
    copy = KeptCopy(
        **msgspec.structs.asdict(manifest.id),
        path=manifest.path,
        how="copy",
        files=tuple(file.path for file in manifest.files),
        sources=tuple(file.signature for file in manifest.files),
        kept_at=utc_now(),
    )
    with contextlib.suppress(ObjectExistsError):  # by a killed process or a concurrent one: the same files
        commit_kept(target, copy)


def _give_verdict(sending: Sending, *, sealed_before: bool) -> None:
    """Record the source's current verdict on the sent bytes, and how they arrived."""
    id, target = sending.candidate.id, sending.target
    for view in (sending.source, target):
        view.refresh(id.series)  # it may have become suspect during the transfer
    before, there = sending.source.history.verdict(id), target.history.verdict(id)
    if there is not None and sealed_outcome(there) is Outcome.SUSPECT:
        return
    if before is None:
        raise CouldNotTellError(f"the verdict on {sending.candidate.answer.path} is gone")
    arrived = Finding(check=_CHECK, severity=Severity.NOTICE, message=_ARRIVED)
    verdict = msgspec.structs.replace(verdict_on_content(before, arrived), read_back="bytes")
    if sealed_before and verdict.outcome is Outcome.GOOD:
        entries = [sending.to.storage.stat(file.path) for file in sending.candidate.manifest.files]
        verdict = msgspec.structs.replace(verdict, seen=tuple((e.key, *e.signature) for e in entries))
    target.history.add_verdict(verdict)


def verdict_on_content(before: Verdict, *more: Finding) -> Verdict:
    """Return the verdict on the sealed bytes alone, without findings about their place."""
    findings = [f for f in before.findings if f.check != _CHECK]
    if before.place_damaged:
        findings = [f for f in findings if f.severity is Severity.SICKNESS or is_clearance(f) or f.check == UNDERSTOOD]
    return Verdict(
        format=VERDICT.writes,
        series=before.series,
        step=before.step,
        generation=before.generation,
        outcome=sealed_outcome(before) or Outcome.SUSPECT,
        findings=(*findings, *more),
        checked_at=utc_now(),
        version=__version__,
        digests=("blake3",),
        facts=Facts() if before.place_damaged else before.facts,
        plugins=before.plugins,
    )


def send_files(sending: Sending) -> str | None:
    """Send every file and read it back. Returns what is wrong with the source, if it is damaged. Damage found in the
    source gets its verdict there. Raises CouldNotTellError if a file could not be sent."""
    files = sending.candidate.manifest.files
    found = for_each(files, lambda file: _have_file(sending, file), sending.over)
    return next((wrong for wrong in found if wrong is not None), None)


def _have_file(sending: Sending, file: File) -> str | None:
    """Send one file. An existing file counts if it is whole; a wrong one is replaced."""
    wrong, twin = _wrong_there(sending, file), _twin_of(sending, file)
    for _ in range(_TRIES + (twin is not None)):
        if wrong:
            _move_aside(sending, file)
        if wrong is not None:
            begin, twin = twin, None  # tried once: it may be damaged
            done = begin is not None and _duplicate(sending, begin, file)
            damaged = None if done else _send_from_any_place(sending, file)
            if damaged is not None:
                return damaged
            wrong = _wrong_there(sending, file)
            if done and wrong is None:
                with sending.lock:
                    sending.shared += file.size
    if wrong:
        remove_wrong_copy(sending.to.storage, sending.to.key(file.path))
    if wrong is not None:
        url = sending.target.run.url
        raise CouldNotTellError(f"{url} does not hold what was sent: {wrong or file.path + ' is not there'}")
    return None


def _wrong_there(sending: Sending, file: File) -> str | None:
    """Return None if the file exists and is whole, "" if it does not exist, else what is wrong."""
    try:
        wrong = read_back(sending.to.storage, sending.to.key(file.path), file, sending.pace)
    except ObjectMissingError:
        return ""
    return None if wrong is None else f"{file.path}: {wrong.message}"


def _twin_of(sending: Sending, file: File) -> str | None:
    """Return where the target has the same bytes in another checkpoint. A kept copy on a disk is a full copy."""
    own = sending.aside and sending.to.storage.root is not None
    return None if own else sending.twins.get(_content(file))


def _duplicate(sending: Sending, twin: str, file: File) -> bool:
    """Have the target make the file from another one of its own. False if it cannot."""
    target = sending.target.run
    return duplicate_within(target, Place(target.storage), twin, sending.to, file.path, file.size)


def _move_aside(sending: Sending, file: File) -> None:
    """Move a damaged or foreign file out of the way. It is kept, but not in place."""
    run, to = sending.target.run, sending.to
    if to.prefix:
        remove_wrong_copy(to.storage, to.key(file.path))
        return
    _refuse_claimed(sending, file.path)
    with contextlib.suppress(ObjectMissingError):
        move_within(run, to, Place(run.records, damaged_folder(sending.candidate.id) + "/"), file.path)


def _refuse_claimed(sending: Sending, path: str) -> None:
    """Refuse to touch files of the target's other checkpoints. Its records are read again for that, once."""
    target = sending.target
    with sending.lock:
        if sending.claimed is None:
            target.refresh()
            sending.claimed = _claimed(target.history, sending.candidate.id)
        owner = sending.claimed.get(path)
    if owner is not None:
        raise CouldNotTellError(
            f"{path} in {target.run.url} belongs to {owner} of {owner.series}, and differs",
            hint=f"ckptguard verify {shlex.quote(target.run.url)}",
        )


def _claimed(history: History, but: CheckpointId) -> dict[str, CheckpointId]:
    """Map each file of a run's checkpoints to its owner, except those of one checkpoint and of quarantined ones."""
    ids = (id for series in history.names for id in history.current_verdicts(series))
    manifests = (history.manifest(id) for id in ids if id != but and not history.is_quarantined(id))
    return {file.path: one.id for one in manifests if one is not None for file in one.files}


def _send_from_any_place(sending: Sending, file: File) -> str | None:
    """Send a file from the first whole copy. Returns what is wrong with every copy, or None when it was sent."""
    wrong = f"no copy of {file.path} is left"
    for place in list(sending.places):
        for _ in range(_TRIES):
            try:
                found = publish_file(place, sending.to, file, sending.pace)
            except (ObjectMissingError, ChangedWhileReadError) as error:
                wrong = error.message
                break
            except ObjectExistsError:
                return None  # another process sends the same; its file is read back like ours
            if found is None:
                with sending.lock:
                    sending.sent += file.size
                return None
            wrong = found
            if _is_damaged(sending, place):
                break
    if sending.places:
        raise CouldNotTellError(f"{sending.candidate.answer.path} could not be read: {wrong}")
    return wrong


def _is_damaged(sending: Sending, place: Place) -> bool:
    """Read a whole copy of the source again: is it damaged? Files in place get their verdict."""
    manifest = sending.candidate.manifest
    with sending.lock:
        if place not in sending.places:
            return True
        if place.prefix:
            read = (read_back(place.storage, place.key(file.path), file, sending.pace) for file in manifest.files)
            damaged = any(read)
        else:
            checkpoint = sending.source.look_again(manifest.path)
            if checkpoint is None:
                return False
            alone = Work(scanner=sending.work.scanner)
            checked = verify_checkpoint(sending.source, checkpoint, Verification(md5=False), work=alone)
            if checked.id != sending.candidate.id:
                raise CouldNotTellError(f"{manifest.path} was saved again meanwhile")
            damaged = checked.outcome is not Outcome.GOOD
        if damaged:
            sending.places.remove(place)
        return damaged
