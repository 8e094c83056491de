"""Send one good checkpoint to another run of the same lineage: files, then its manifest, then a verdict once every byte
was read back.

Whatever ends it, doing it again goes on where it ended: a file that is there and whole is not sent again.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, ObjectExistsError, ObjectMissingError, RecordsError
from ckptguard.keep.quarantine import quarantine
from ckptguard.records.kept import KeptCopy, commit_kept, kept_folder, read_kept
from ckptguard.records.ledger import append_verdict
from ckptguard.records.manifests import manifest_key, write_manifest
from ckptguard.records.run import Run, read_record
from ckptguard.records.who_and_when import utc_now
from ckptguard.replicas.send_files import Sending, send_files
from ckptguard.runs.file_signatures import entry_now
from ckptguard.runs.find_known_good import Candidate
from ckptguard.runs.free_space import need_room
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.runs.work import Work
from ckptguard.scan.paced_reader import Pace
from ckptguard.storage import Storage
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import File, Manifest, decode_manifest, identity
from ckptguard.values.record_text import decode_checked
from ckptguard.values.verdict import Facts, Finding, Outcome, Severity, Verdict, is_clearance
from ckptguard.version import __version__

CHECK = "replica"
READ_BACK = "read back"  # how the bytes were found to be right there
_ARRIVED = "every byte was read back from here and is as it was sealed"


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """How it went. `done`: "sent"; "there" (it was, and has its verdict); "raced" (another process sealed it there
    first); "damaged" (no copy of it in the source is whole any more). `sent`: bytes that went over."""

    done: str
    sent: int = 0
    message: str | None = None

    @property
    def verified(self) -> str | None:
        """How its bytes were found to be right there, if that was done now."""
        return READ_BACK if self.done == "sent" else None


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
    occupant = target.history.current(id.series, id.step, manifest.path) if there is None else None
    aside = occupant is not None or read_kept(target.run, id) is not None
    sending = Sending(
        source=source,
        target=target,
        candidate=candidate,
        work=work,
        pace=pace,
        storage=target.run.records if aside else target.run.storage,
        prefix=kept_folder(id) + "/" if aside else "",
        places=_places(source.run, candidate),
    )
    _need_room(sending)
    wrong = send_files(sending)
    if wrong is not None:
        return Delivery(done="damaged", sent=sending.sent, message=wrong)
    if there is None:
        first = _commit(sending, aside=aside, occupant=occupant)
        if first is not None:
            return Delivery(done="raced", sent=sending.sent, message=first)
    standing = target.history.standings(id.series).get(id)
    if there is not None and not sending.sent and standing is not None and standing.outcome is Outcome.GOOD:
        return Delivery(done="there")
    _give_verdict(sending, sealed_before=there is not None and not aside)
    return Delivery(done="sent", sent=sending.sent)


def has_arrived(target: RunView, candidate: Candidate) -> bool:
    """Whether the target has a verdict on this very checkpoint, whatever it says. CouldNotTellError if it has another
    one of the same id."""
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
    try:
        decode_checked(text, dict[str, Any], "a manifest")
    except RecordsError:
        return None
    return text


def _places(source: Run, candidate: Candidate) -> list[tuple[Storage, str]]:
    places: list[tuple[Storage, str]] = [(source.storage, "")] if candidate.in_place else []
    if candidate.copy is not None:
        places.append((source.records, candidate.copy.folder + "/"))
    return places


def _need_room(sending: Sending) -> None:
    """StorageFullError, before the first byte, unless what is not there yet fits."""
    if sending.storage.free_space() is None:
        return
    now = ((entry_now(sending.storage, sending.prefix + f.path), f.size) for f in sending.candidate.manifest.files)
    missing = sum(size for entry, size in now if entry is None or entry.size != size)
    need_room(sending.storage, missing, f"the replica of {sending.candidate.answer.path}")


def _commit(sending: Sending, *, aside: bool, occupant: CheckpointId | None) -> str | None:
    """Seal it there; a sentence if another process was first."""
    target, manifest, id = sending.target, sending.candidate.manifest, sending.candidate.id
    files = tuple(_as_described(file, sending.storage, sending.prefix + file.path, aside) for file in manifest.files)
    if aside:
        _mark_kept(target.run, manifest)
    if occupant is not None and occupant.generation < id.generation:
        with contextlib.suppress(ObjectMissingError):
            quarantine(target, manifest.path, reason=f"its run has saved step {id.step} anew", suspect=False)
    try:
        write_manifest(target.run, msgspec.structs.replace(manifest, files=files, nonce=uuid.uuid4().hex))
    except BusyError as error:
        target.refresh(id.series)
        return error.message
    if _whole_manifest(target.run, id) is None:
        raise CouldNotTellError(f"{target.run.url} does not hold the manifest that was written to it")
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


def _mark_kept(target: Run, manifest: Manifest) -> None:
    copy = KeptCopy(
        series=manifest.series,
        step=manifest.step,
        generation=manifest.generation,
        path=manifest.path,
        how="copy",
        files=tuple(file.path for file in manifest.files),
        sources=tuple((file.size, None, None, None) for file in manifest.files),
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
    arrived = Finding(check=CHECK, severity=Severity.NOTICE, message=_ARRIVED)
    verdict = msgspec.structs.replace(verdict_on_content(before, arrived), read_back="bytes")
    if sealed_before and verdict.outcome is Outcome.GOOD:
        entries = [sending.storage.stat(file.path) for file in sending.candidate.manifest.files]
        verdict = msgspec.structs.replace(verdict, seen=tuple((e.key, *e.signature) for e in entries))
    target.history.note_verdict(id.series, append_verdict(target.run, verdict))


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
