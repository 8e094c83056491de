"""Send one good checkpoint to another run of the same lineage: files, then its manifest, then a verdict once every byte
was read back.

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
from ckptguard.keep.quarantine import damaged_folder, quarantine
from ckptguard.records.kept import KeptCopy, commit_kept, kept_folder, read_kept
from ckptguard.records.manifests import manifest_key, write_manifest
from ckptguard.records.run import Run, read_record
from ckptguard.records.who_and_when import utc_now
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.find_known_good import Candidate
from ckptguard.runs.free_space import need_room
from ckptguard.runs.history import History
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.runs.work import Work
from ckptguard.scan.paced_reader import Pace, read_through
from ckptguard.scan.reread import read_back
from ckptguard.storage import Storage
from ckptguard.storage.protocol import find_entry
from ckptguard.storage.remote.upload import SMALLEST_PART
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import File, Manifest, decode_manifest, identity
from ckptguard.values.record_text import decode_checked
from ckptguard.values.verdict import Facts, Finding, Outcome, Severity, Verdict, is_clearance
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.version import __version__

_FILES_AT_ONCE = 3
_TRIES = 2  # a source that reads whole after all; a store that kept something else than was sent
_CHECK = "replica"
_ARRIVED = "every byte was read back from here and is as it was sealed"


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """How it went. `done`: "sent"; "there" (it was, and has its verdict); "raced" (another process sealed it there
    first); "damaged" (no copy of it in the source is whole any more). `sent`: bytes that went over."""

    done: str
    sent: int = 0
    message: str | None = None


@dataclass
class Sending:
    """One checkpoint on its way to `storage`, where its files lie below `prefix`. `places` are where whole copies of it
    are, best first; `sent` counts bytes that went over."""

    source: RunView
    target: RunView
    candidate: Candidate
    work: Work
    pace: Pace
    storage: Storage
    prefix: str
    places: list[tuple[Storage, str]]
    sent: int = 0
    claimed: dict[str, CheckpointId] | None = None  # the target's files that other checkpoints are made of
    lock: threading.Lock = field(default_factory=threading.Lock)  # for all above that changes, and for the views


def send_checkpoint(source: RunView, target: RunView, candidate: Candidate, *, work: Work, pace: Pace) -> Delivery:
    """Have a known-good checkpoint of `source` be one of `target` too, under its own name.

    What of it is found damaged in the source gets its verdict there, and is never sent. Where an older generation
    lies under its name, that one is put aside, after the new one has arrived as a kept copy. Of one that the target has
    a verdict on, files that are gone or damaged there are sent again. The names of its series' records are read again
    before the verdict, in both. CouldNotTellError.
    """
    id, manifest = candidate.id, candidate.manifest
    there = manifest_there(target, candidate)
    if there is None and id in target.history.sealed(id.series):
        target.run.records.remove(manifest_key(id))  # what cannot be read seals nothing
        target.refresh(id.series)
    lies = target.history.current(id.series, id.step, manifest.path)
    # The place is that of the generation that lies there, however much older ones of the step miss their files.
    aside = lies not in (None, id) or read_kept(target.run, id) is not None
    places = [(source.run.storage, "")] if candidate.in_place else []
    if candidate.copy is not None:
        places.append((source.run.records, candidate.copy.folder + "/"))
    sending = Sending(
        source=source,
        target=target,
        candidate=candidate,
        work=work,
        pace=pace,
        storage=target.run.records if aside else target.run.storage,
        prefix=kept_folder(id) + "/" if aside else "",
        places=places,
    )
    _need_room(sending)
    wrong = send_files(sending)
    if wrong is not None:
        return Delivery(done="damaged", sent=sending.sent, message=wrong)
    if there is None:
        first = _commit(sending, aside=aside, occupant=lies)
        if first is not None:
            return Delivery(done="raced", sent=sending.sent, message=first)
    elif aside:
        _mark_kept(target.run, there)
    standing = target.history.standings(id.series).get(id)
    if there is not None and not sending.sent and standing is not None and standing.outcome is Outcome.GOOD:
        verdict, found = target.history.verdict(id), (find_entry(target.run.storage, f.path) for f in manifest.files)
        if not aside and not looks_as_read([e for e in found if e is not None], there, verdict):
            _give_verdict(sending, sealed_before=True)  # all of it was read just now
        return Delivery(done="there")
    _give_verdict(sending, sealed_before=there is not None and not aside)
    return Delivery(done="sent", sent=sending.sent)


def has_arrived(target: RunView, candidate: Candidate) -> bool:
    """True if the target has a verdict on this very checkpoint. CouldNotTellError if it has another of the same id."""
    return manifest_there(target, candidate) is not None and target.history.verdict(candidate.id) is not None


def manifest_there(target: RunView, candidate: Candidate) -> Manifest | None:
    """The target's manifest of this very checkpoint; None if there is none, or a damaged one. CouldNotTellError if it
    has another one of the same id."""
    id = candidate.id
    if id not in target.history.sealed(id.series):
        return None
    text = _whole_manifest(target.run, id)
    if text is None:
        return None
    there = decode_manifest(text)
    if there.id != id or identity(there.files) != identity(candidate.manifest.files):
        raise CouldNotTellError(
            f"{target.run.url} holds another {id} of {id.series}: the two went different ways",
            hint="replicate to another place",
        )
    return there


def _whole_manifest(target: Run, id: CheckpointId) -> bytes | None:
    """The text of a manifest unless it is damaged. One of a newer format is not."""
    text = read_record(target, manifest_key(id)) or b""
    with contextlib.suppress(RecordsError):
        decode_checked(text, dict[str, Any], "a manifest")
        return text
    return None


def _need_room(sending: Sending) -> None:
    """StorageFullError, before the first byte, unless what is not there yet fits."""
    if sending.storage.free_space() is None:
        return
    now = ((find_entry(sending.storage, sending.prefix + f.path), f.size) for f in sending.candidate.manifest.files)
    missing = sum(size for entry, size in now if entry is None or entry.size != size)
    need_room(sending.storage, missing, f"the replica of {sending.candidate.answer.path}")


def _commit(sending: Sending, *, aside: bool, occupant: CheckpointId | None) -> str | None:
    """Seal it there; a sentence if another process was first."""
    target, manifest, id = sending.target, sending.candidate.manifest, sending.candidate.id
    files = tuple(_as_described(file, sending.storage, sending.prefix + file.path, aside) for file in manifest.files)
    manifest = msgspec.structs.replace(manifest, files=files, nonce=uuid.uuid4().hex)
    if aside:
        _mark_kept(target.run, manifest)
    if occupant is not None and occupant.generation < id.generation:
        with contextlib.suppress(ObjectMissingError):
            quarantine(target, manifest.path, reason=f"its run has saved {manifest.path} anew", suspect=False)
    try:
        write_manifest(target.run, manifest)
    except BusyError as error:
        target.refresh(id.series)
        return error.message
    if _whole_manifest(target.run, id) is None:
        raise CouldNotTellError(f"{target.run.url} does not hold the manifest that was written to it")
    return None


def _as_described(file: File, storage: Storage, key: str, aside: bool) -> File:
    """The file as its new place describes it; a kept copy is described by no place in the run."""
    if aside:
        return msgspec.structs.replace(file, mtime_ns=None, inode=None, etag=None)
    entry = storage.stat(key)
    return msgspec.structs.replace(file, mtime_ns=entry.mtime_ns, inode=entry.inode, etag=entry.etag)


def _mark_kept(target: Run, manifest: Manifest) -> None:
    """Have what was sent aside count as the kept copy of what the target's manifest says."""
    copy = KeptCopy(
        **msgspec.structs.asdict(manifest.id),
        path=manifest.path,
        how="copy",
        files=tuple(file.path for file in manifest.files),
        sources=tuple((file.size, file.mtime_ns, file.inode, file.etag) for file in manifest.files),
        kept_at=utc_now(),
    )
    with contextlib.suppress(ObjectExistsError):  # by a killed process, or one that races with this: the same files
        commit_kept(target, copy)


def _give_verdict(sending: Sending, *, sealed_before: bool) -> None:
    """What the source's verdict now says of the bytes that were sent, and how they arrived."""
    id, target = sending.candidate.id, sending.target
    for view in (sending.source, target):
        view.refresh(id.series)  # it may have become suspect while it was on its way
    before, there = sending.source.history.verdict(id), target.history.verdict(id)
    if there is not None and sealed_outcome(there) is Outcome.SUSPECT:
        return
    if before is None:
        raise CouldNotTellError(f"the verdict on {sending.candidate.answer.path} is gone")
    arrived = Finding(check=_CHECK, severity=Severity.NOTICE, message=_ARRIVED)
    verdict = msgspec.structs.replace(verdict_on_content(before, arrived), read_back="bytes")
    if sealed_before and verdict.outcome is Outcome.GOOD:
        entries = [sending.storage.stat(file.path) for file in sending.candidate.manifest.files]
        verdict = msgspec.structs.replace(verdict, seen=tuple((e.key, *e.signature) for e in entries))
    target.history.add_verdict(verdict)


def verdict_on_content(before: Verdict, *more: Finding) -> Verdict:
    """A verdict without what it says of its place alone: of the sealed bytes, wherever they lie."""
    findings = [f for f in before.findings if f.check != _CHECK]
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


def send_files(sending: Sending) -> str | None:
    """Have every file there, read back. Returns what is wrong with the source, if it is damaged.

    What of it is found damaged in the source gets its verdict there. CouldNotTellError if a file could not be sent.
    """
    files = sorted(sending.candidate.manifest.files, key=lambda f: -f.size)
    with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(files) or 1), thread_name_prefix="ckptguard-send") as threads:
        tasks = [threads.submit(_have_file, sending, file) for file in files]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            for one in tasks:
                one.cancel()
    failed = [error for one in tasks if not one.cancelled() and (error := one.exception()) is not None]
    if failed:
        raise failed[0]
    return next((wrong for one in tasks if (wrong := one.result()) is not None), None)


def _have_file(sending: Sending, file: File) -> str | None:
    """One file: what is there already counts if it is whole; what is not as it was sent goes, and is sent anew."""
    key = sending.prefix + file.path
    wrong = _wrong_there(sending, key, file)
    for _ in range(_TRIES):
        if wrong:
            _move_aside(sending, key, file)
        if wrong is not None:
            damaged = _send_from_any_place(sending, key, file)
            if damaged is not None:
                return damaged
            wrong = _wrong_there(sending, key, file)
    if wrong:
        sending.storage.remove(key)
    if wrong is not None:
        url = sending.target.run.url
        raise CouldNotTellError(f"{url} does not hold what was sent: {wrong or file.path + ' is not there'}")
    return None


def _wrong_there(sending: Sending, key: str, file: File) -> str | None:
    """None: the file is there and whole; an empty text: it is not there."""
    try:
        wrong = read_back(sending.storage, key, file, sending.pace)
    except ObjectMissingError:
        return ""
    return None if wrong is None else f"{file.path}: {wrong.message}"


def _move_aside(sending: Sending, key: str, file: File) -> None:
    """What lies in the way is damaged, or somebody's: it is kept, but not in place."""
    if sending.prefix:
        sending.storage.remove(key)
        return
    _refuse_claimed(sending, file.path)
    storage, run_prefix, records_prefix = sending.target.run.shared()
    folder = damaged_folder(sending.candidate.id)
    with contextlib.suppress(ObjectMissingError):
        storage.move(run_prefix + key, f"{records_prefix}{folder}/{key}")


def _refuse_claimed(sending: Sending, path: str) -> None:
    """Touch nothing that another checkpoint of the target is made of. Its records are read again for that, once."""
    target = sending.target
    with sending.lock:
        if sending.claimed is None:
            target.refresh()
            sending.claimed = _claimed(target.history, sending.candidate.id)
        owner = sending.claimed.get(path)
    if owner is not None:
        raise CouldNotTellError(
            f"{path} in {target.run.url} belongs to {owner} of {owner.series}, and differs",
            hint=f"ckptguard verify {target.run.url}",
        )


def _claimed(history: History, but: CheckpointId) -> dict[str, CheckpointId]:
    """Each file of a run's checkpoints, without those of one and of what was moved aside."""
    ids = (id for series in history.names for id in history.standings(series))
    manifests = (history.manifest(id) for id in ids if id != but and not history.is_quarantined(id))
    return {file.path: one.id for one in manifests if one is not None for file in one.files}


def _send_from_any_place(sending: Sending, key: str, file: File) -> str | None:
    """What is wrong with every copy of the source, if none is whole; None when it was sent."""
    wrong = f"no copy of {file.path} is there any more"
    for storage, prefix in list(sending.places):
        for _ in range(_TRIES):
            try:
                found = send_file(storage, prefix + file.path, sending.storage, key, file, sending.pace)
            except (ObjectMissingError, ChangedWhileReadError) as error:
                wrong = error.message
                break
            except ObjectExistsError:
                return None  # another process sends the same; what is there is read back like our own
            if found is None:
                with sending.lock:
                    sending.sent += file.size
                return None
            wrong = found
            if _is_damaged(sending, storage, prefix):
                break
    if sending.places:
        raise CouldNotTellError(f"{sending.candidate.answer.path} could not be read: {wrong}")
    return wrong


def send_file(source: Storage, source_key: str, target: Storage, target_key: str, file: File, pace: Pace) -> str | None:
    """Put a copy of a sealed file under a free key. Returns what is wrong with the source's bytes, and then nothing was
    put there; None if they are what was sealed. ObjectExistsError if the key is taken; ChangedWhileReadError."""
    from ckptguard.scan.sealed_stream import SealedStream

    stream = SealedStream(file)
    with source.open(source_key) as reader:
        if reader.entry.size != file.size:
            return f"{file.path} has {reader.entry.size} bytes instead of {file.size}"
        with target.upload(target_key) as upload:

            def send(block: bytes) -> None:
                stream.add(block)
                upload.write(block)

            read_through(reader, send, pace, block=SMALLEST_PART, remote=source.root is None)
            reader.check_unchanged()
            wrong = stream.wrong()
            if wrong is None:
                upload.commit()
    return wrong


def _is_damaged(sending: Sending, storage: Storage, prefix: str) -> bool:
    """Read a whole copy of the source anew: is it not as it was sealed? What lies in place gets its verdict."""
    manifest = sending.candidate.manifest
    with sending.lock:
        if (storage, prefix) not in sending.places:
            return True
        if prefix:
            damaged = any(read_back(storage, prefix + file.path, file, sending.pace) for file in manifest.files)
        else:
            checkpoint = sending.source.look_again(manifest.path)
            if checkpoint is None:
                return False
            alone = Work(scanner=sending.work.scanner)
            checked = verify_checkpoint(sending.source, checkpoint, Verification(md5=False), work=alone)
            if checked.id != sending.candidate.id:
                raise CouldNotTellError(f"{manifest.path} was saved anew meanwhile")
            damaged = checked.outcome is not Outcome.GOOD
        if damaged:
            sending.places.remove((storage, prefix))
        return damaged
