"""Send one good checkpoint to another run of the same lineage: files first, its manifest last, and a verdict once
every byte was read back from there.

Whatever ends it, doing it again goes on where it ended: a file that is there and whole is not sent again.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
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
from ckptguard.keep.quarantine import quarantine
from ckptguard.records.clock import utc_now
from ckptguard.records.kept import KeptCopy, commit_kept, kept_folder, read_kept
from ckptguard.records.ledger import append_verdict
from ckptguard.records.manifests import manifest_key, read_manifest, write_manifest
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run, read_record
from ckptguard.replicas.send_file import send_file
from ckptguard.runs.find_known_good import Candidate
from ckptguard.runs.free_space import need_room
from ckptguard.runs.history import History, Key, load_history
from ckptguard.runs.listing import find_checkpoint
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.scan import Scanner
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.reread import read_back
from ckptguard.storage import Storage
from ckptguard.values.ids import checkpoint_id, record_name, series_folder
from ckptguard.values.manifest import File, Manifest, identity
from ckptguard.values.record_text import decode_checked
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Facts, Finding, Outcome, Severity, Verdict, is_clearance
from ckptguard.verify.checkpoint import verify_checkpoint
from ckptguard.version import __version__

CHECK = "replica"
READ_BACK = "read back"
_ARRIVED = "every byte was read back from here and is as it was sealed"
_FILES_AT_ONCE = 3
_TRIES = 2  # a source that reads whole after all; a store that kept something else than was sent


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """How it went. `done`: "sent"; "there" (it was, and has its verdict); "raced" (another process sealed it there
    first); "damaged" (no copy of it in the source is whole any more). `sent`: bytes that went over."""

    done: str
    sent: int = 0
    verified: str | None = None  # `READ_BACK`, where it was done now
    message: str | None = None


@dataclass
class _Work:
    """One checkpoint on its way."""

    source: Run
    target: Run
    candidate: Candidate
    settings: Settings
    scanner: Scanner
    pace: Pace
    storage: Storage  # where its files go
    prefix: str
    places: list[tuple[Storage, str]] = field(default_factory=list)  # where whole copies of it are, best first
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def send_checkpoint(
    source: Run,
    target: Run,
    candidate: Candidate,
    settings: Settings,
    *,
    scanner: Scanner,
    pace: Pace,
    heal: bool = False,
) -> Delivery:
    """Have a known-good checkpoint of `source` be one of `target` too, under its own name.

    What of it is found damaged in the source gets its verdict there, and is never sent. Where an older generation
    lies under its name, that one is put aside, after the new one has arrived as a kept copy. With `heal` also one that
    the target has a verdict on is looked at: files that are gone or damaged there are sent again. CouldNotTellError.
    """
    history, key, manifest = load_history(target), candidate.key, candidate.manifest
    series = manifest.series
    if has_arrived(history, candidate) and not heal:
        return Delivery(done="there")
    if key in history.sealed(series) and _is_unreadable(target, manifest):
        target.records.remove(manifest_key(series, *key))  # what cannot be read seals nothing
        history = load_history(target)
    there = history.manifest(series, key)
    occupant = history.current(series, key[0], manifest.path) if there is None else None
    aside = occupant is not None or read_kept(target, series, *key) is not None
    storage = target.records if aside else target.storage
    prefix = kept_folder(series, *key) + "/" if aside else ""
    work = _Work(source, target, candidate, settings, scanner, pace, storage, prefix, places=_places(source, candidate))
    _need_room(work)
    wrong = _send_files(work)
    if wrong is not None:
        return Delivery(done="damaged", sent=work.sent, message=wrong)
    first = (
        _commit(work, aside=aside, occupied=occupant is not None and occupant[1] < key[1]) if there is None else None
    )
    if first is not None:
        return Delivery(done="raced", sent=work.sent, message=first)
    standing = history.standings(series).get(key)
    if there is not None and not work.sent and standing is not None and standing.outcome is Outcome.GOOD:
        return Delivery(done="there")
    _give_verdict(work, load_history(source), sealed_before=there is not None and not aside)
    return Delivery(done="sent", sent=work.sent, verified=READ_BACK)


def has_arrived(target: History, candidate: Candidate) -> bool:
    """Whether the target has a verdict on this very checkpoint, whatever it says. CouldNotTellError if it has another
    one of the same id."""
    key, manifest = candidate.key, candidate.manifest
    if key not in target.sealed(manifest.series) or _is_unreadable(target.run, manifest):
        return False
    there = read_manifest(target.run, manifest.series, *key)
    if there is not None and identity(there.files) != identity(manifest.files):
        raise CouldNotTellError(
            f"{target.run.url} holds another {checkpoint_id(*key)} of {manifest.series}: the two went different ways",
            hint="replicate to another place",
        )
    return there is not None and target.verdict(manifest.series, key) is not None


def _is_unreadable(target: Run, manifest: Manifest) -> bool:
    """Whether the target's manifest is damaged (not: of a newer format)."""
    text = read_record(target, manifest_key(manifest.series, manifest.step, manifest.generation))
    try:
        decode_checked(text or b"", dict[str, Any], "a manifest")
    except RecordsError:
        return True
    return False


def _places(source: Run, candidate: Candidate) -> list[tuple[Storage, str]]:
    places: list[tuple[Storage, str]] = [(source.storage, "")] if candidate.in_place else []
    if candidate.copy is not None:
        places.append((source.records, candidate.copy.folder + "/"))
    return places


def _need_room(work: _Work) -> None:
    """StorageFullError, before the first byte, unless what is not there yet fits."""
    if work.storage.free_space() is None:
        return
    missing = 0
    for file in work.candidate.manifest.files:
        try:
            missing += file.size if work.storage.stat(work.prefix + file.path).size != file.size else 0
        except ObjectMissingError:
            missing += file.size
    need_room(work.storage, missing, f"the replica of {work.candidate.answer.path}")


def _send_files(work: _Work) -> str | None:
    """Have every file there, read back; what is wrong with the source, if it is damaged."""
    files = sorted(work.candidate.manifest.files, key=lambda f: -f.size)
    with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(files) or 1), thread_name_prefix="ckptguard-send") as threads:
        sending = [threads.submit(_send_one, work, file) for file in files]
        try:
            wait(sending, return_when=FIRST_EXCEPTION)
        finally:
            for one in sending:
                one.cancel()
    failed = [error for one in sending if not one.cancelled() and (error := one.exception()) is not None]
    if failed:
        raise failed[0]
    return next((wrong for one in sending if (wrong := one.result()) is not None), None)


def _send_one(work: _Work, file: File) -> str | None:
    """One file: what is there already counts if it is whole; what is not as it was sent goes, and is sent anew."""
    key = work.prefix + file.path
    wrong = _wrong_there(work, key, file)
    for _ in range(_TRIES):
        if wrong is None:
            return None
        if wrong:
            _move_aside(work, key, file)
        damaged = _send_from_any_place(work, key, file)
        if damaged is not None:
            return damaged
        wrong = _wrong_there(work, key, file)
    if wrong is None:
        return None
    if wrong:
        work.storage.remove(key)
    raise CouldNotTellError(f"{work.target.url} does not hold what was sent: {wrong or file.path + ' is not there'}")


def _wrong_there(work: _Work, key: str, file: File) -> str | None:
    """None: the file is there and whole; an empty text: it is not there."""
    try:
        wrong = read_back(work.storage, key, file, work.pace)
    except ObjectMissingError:
        return ""
    return None if wrong is None else f"{file.path}: {wrong.message}"


def _move_aside(work: _Work, key: str, file: File) -> None:
    """What lies in the way is damaged, or somebody's: it is kept, but not in place."""
    if work.prefix:
        work.storage.remove(key)
        return
    _refuse_claimed(work, file.path)
    storage, run_prefix, records_prefix = work.target.shared()
    own = f"{QUARANTINE}/{series_folder(work.candidate.manifest.series)}/{record_name(*work.candidate.key)}"
    with contextlib.suppress(ObjectMissingError):
        storage.move(run_prefix + key, f"{records_prefix}{own}.damaged-{uuid.uuid4().hex[:8]}/{key}")


def _refuse_claimed(work: _Work, path: str) -> None:
    """Nothing that another checkpoint of the target is made of is touched."""
    history, own = load_history(work.target), work.candidate.key
    for series in history.names:
        for key in history.standings(series):
            manifest = history.manifest(series, key) if (series, key) != (work.candidate.manifest.series, own) else None
            gone = key in history.quarantined.get(series, ())
            if manifest is not None and not gone and manifest.file(path) is not None:
                raise CouldNotTellError(
                    f"{path} in {work.target.url} belongs to {checkpoint_id(*key)} of {series}, and differs",
                    hint=f"ckptguard verify {work.target.url}",
                )


def _send_from_any_place(work: _Work, key: str, file: File) -> str | None:
    """What is wrong with every copy of the source, if none is whole; None when it was sent."""
    wrong = f"no copy of {file.path} is there any more"
    for storage, prefix in list(work.places):
        for _ in range(_TRIES):
            try:
                found = send_file(storage, prefix + file.path, work.storage, key, file, work.pace)
            except (ObjectMissingError, ChangedWhileReadError) as error:
                wrong = error.message
                break
            except ObjectExistsError:
                return None  # another process sends the same; what is there is read back like our own
            if found is None:
                work.sent += file.size
                return None
            wrong = found
            if _is_damaged(work, storage, prefix):
                break
    if work.places:
        raise CouldNotTellError(f"{work.candidate.answer.path} could not be read: {wrong}")
    return wrong


def _is_damaged(work: _Work, storage: Storage, prefix: str) -> bool:
    """Read a whole copy of the source anew: is it not as it was sealed? What lies in place gets its verdict."""
    manifest = work.candidate.manifest
    with work.lock:
        if (storage, prefix) not in work.places:
            return True
        if prefix:
            damaged = any(read_back(storage, prefix + file.path, file, work.pace) for file in manifest.files)
        else:
            checkpoint = find_checkpoint(work.source, manifest.path)
            if checkpoint is None:
                return False
            checked = verify_checkpoint(work.source, checkpoint, work.settings, scanner=work.scanner, md5=False)
            if checked.id != work.candidate.answer.id:
                raise CouldNotTellError(f"{manifest.path} was saved anew meanwhile")
            damaged = checked.outcome is not Outcome.GOOD
        if damaged:
            work.places.remove((storage, prefix))
        return damaged


def _commit(work: _Work, *, aside: bool, occupied: bool) -> str | None:
    """Seal it there; a sentence if another process was first."""
    target, manifest, key = work.target, work.candidate.manifest, work.candidate.key
    files = tuple(_as_described(file, work.storage, work.prefix + file.path, aside) for file in manifest.files)
    if aside:
        _mark_kept(target, manifest, key)
    if occupied:
        with contextlib.suppress(ObjectMissingError):
            quarantine(target, manifest.path, reason=f"its run has saved step {key[0]} anew", suspect=False)
    try:
        write_manifest(target, msgspec.structs.replace(manifest, files=files, nonce=uuid.uuid4().hex))
    except BusyError as error:
        return error.message
    if _is_unreadable(target, manifest):
        raise CouldNotTellError(f"{target.url} does not hold the manifest that was written to it")
    return None


def _as_described(file: File, storage: Storage, key: str, aside: bool) -> File:
    """The file as its new place describes it; a kept copy is described by no place in the run."""
    entry = None if aside else storage.stat(key)
    return msgspec.structs.replace(
        file,
        mtime_ns=entry.mtime_ns if entry else None,
        inode=entry.inode if entry else None,
        etag=entry.etag if entry else None,
    )


def _mark_kept(target: Run, manifest: Manifest, key: Key) -> None:
    copy = KeptCopy(
        series=manifest.series,
        step=key[0],
        generation=key[1],
        path=manifest.path,
        how="copy",
        files=tuple(file.path for file in manifest.files),
        sources=tuple((file.size, None, None, None) for file in manifest.files),
        kept_at=utc_now(),
    )
    try:
        commit_kept(target, copy)
    except ObjectExistsError:
        pass  # by a process that was killed, or that races with this one: the same files


def _give_verdict(work: _Work, history: History, *, sealed_before: bool) -> None:
    """What the source's verdict now says of the bytes that were sent, and how they arrived."""
    key, manifest = work.candidate.key, work.candidate.manifest
    arrived = Finding(check=CHECK, severity=Severity.NOTICE, message=_ARRIVED)
    before = history.verdict(manifest.series, key)
    there = load_history(work.target).verdict(manifest.series, key)
    if there is not None and sealed_outcome(there) is Outcome.SUSPECT:
        return  # it may have become so while it was on its way
    if before is None:
        raise CouldNotTellError(f"the verdict on {work.candidate.answer.path} is gone")
    verdict = msgspec.structs.replace(verdict_on_content(before, arrived), read_back="bytes")
    if sealed_before and verdict.outcome is Outcome.GOOD:
        entries = [work.storage.stat(file.path) for file in manifest.files]
        verdict = msgspec.structs.replace(verdict, seen=tuple((e.key, *e.signature) for e in entries))
    append_verdict(work.target, verdict)


def verdict_on_content(before: Verdict, *more: Finding) -> Verdict:
    """A verdict without what it says of its place alone: of the sealed bytes, wherever they lie."""
    findings = [f for f in before.findings if f.check != CHECK]
    if before.place_damaged:
        findings = [f for f in findings if f.severity is Severity.SICKNESS or is_clearance(f)]
    return Verdict(
        series=before.series,
        step=before.step,
        generation=before.generation,
        outcome=sealed_outcome(before) or Outcome.SUSPECT,
        findings=(*findings, *more),
        checked_at=utc_now(),
        version=__version__,
        digests=("blake3",),
        facts=Facts() if before.place_damaged else before.facts,
    )
