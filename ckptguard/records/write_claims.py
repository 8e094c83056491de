"""Claims: which process writes a checkpoint straight under its final name, where no rename can publish it whole."""

from __future__ import annotations

import contextlib
import uuid

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, ObjectExistsError, ObjectMissingError, StorageError
from ckptguard.records.clock import utc_now
from ckptguard.records.owners import Owner, has_ended, is_here, this_process
from ckptguard.records.run import Run, create_record, list_records, read_record
from ckptguard.values.ids import is_safe_path
from ckptguard.values.record_text import decode_record

FOLDER = "saving"
SILENCE = 900.0  # seconds without a sign of life after which a writer elsewhere is taken for dead
RENEWED = 60.0  # seconds between its signs of life


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """`path` is being written, as this generation of this step. It counts as long as its owner lives."""

    format: int = 1
    path: str
    series: str
    step: int
    generation: int
    token: str
    owner: Owner
    since: str

    @property
    def key(self) -> str:
        """The record's key: one for each path."""
        return f"{FOLDER}/{self.path}.json"


def claim_path(run: Run, *, path: str, series: str, step: int, generation: int) -> Claim:
    """Claim a path; of racing writers one gets it, and the others BusyError, which names it."""
    claim = Claim(
        path=path,
        series=series,
        step=step,
        generation=generation,
        token=uuid.uuid4().hex,
        owner=this_process(),
        since=utc_now(),
    )
    try:
        create_record(run, claim.key, msgspec.json.encode(claim) + b"\n")
    except ObjectExistsError as error:
        other = read_claim(run, path)
        if other is not None and other.token == claim.token:
            return claim  # ours: the first answer was lost on the way
        who = f"process {other.owner.pid} on {other.owner.host}, since {other.since}" if other else "another process"
        raise BusyError(f"{path} is being written by {who}") from error
    return claim


def read_claim(run: Run, path: str) -> Claim | None:
    """The claim of a path, or None. RecordsError if it cannot be read."""
    text = read_record(run, f"{FOLDER}/{path}.json")
    return None if text is None else decode_record(text, Claim, "a claim")


def list_claims(run: Run) -> list[Claim]:
    """Every claim that can be read, of the path that its place says."""
    found = []
    for name in list_records(run, FOLDER):
        path = name.removesuffix(".json")
        if path == name or not is_safe_path(path):
            continue
        with contextlib.suppress(CouldNotTellError):
            claim = read_claim(run, path)
            if claim is not None and claim.path == path:
                found.append(claim)
    return found


def renew(run: Run, claim: Claim) -> None:
    """A sign of life. StorageError."""
    with run.records.upload(claim.key, replace=True) as upload:
        upload.write(msgspec.json.encode(claim) + b"\n")
        upload.commit()


def release(run: Run, claim: Claim) -> None:
    """Give a claim up; one that is gone is no error."""
    run.records.remove(claim.key)


def is_dead(run: Run, claim: Claim) -> bool:
    """Whether the writer is known to be gone: its process has ended, or, elsewhere, it gave no sign of life for long
    by the storage's own clock. In doubt it lives."""
    if is_here(claim.owner):
        return has_ended(claim.owner)
    try:
        renewed = run.records.stat(claim.key).mtime_ns
        now = storage_time(run)
    except StorageError:
        return False
    return renewed is not None and now is not None and (now - renewed) / 1e9 > SILENCE


def storage_time(run: Run) -> int | None:
    """The time in ns that the storage gives to an object that is created now, for clocks of two machines cannot be
    compared; None where it gives none. StorageError."""
    key = f"{FOLDER}/.tmp-now-{uuid.uuid4().hex}"
    run.records.create(key, b"")
    try:
        return run.records.stat(key).mtime_ns
    except ObjectMissingError:
        return None
    finally:
        with contextlib.suppress(StorageError):
            run.records.remove(key)
