"""Claims: which process writes a checkpoint straight under its final name, where no rename can publish it whole."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from ckptguard.errors import BusyError, CouldNotTellError
from ckptguard.records.leases import Lease, new_lease, read_lease, take
from ckptguard.records.run import Run, list_records
from ckptguard.values.ids import is_safe_path

FOLDER = "saving"
RENEWED = 60.0  # seconds between a writer's signs of life


class Claim(Lease, frozen=True, kw_only=True):
    """`path` is being written, as this generation of this step. It counts as long as its owner lives."""

    silence: ClassVar[float | None] = 900.0

    path: str
    series: str
    step: int
    generation: int

    @property
    def key(self) -> str:
        """The record's key: one for each path."""
        return f"{FOLDER}/{self.path}.json"


def claim_path(run: Run, *, path: str, series: str, step: int, generation: int) -> Claim:
    """Claim a path; of racing writers one gets it, and the others BusyError, which names it."""
    claim = new_lease(Claim, path=path, series=series, step=step, generation=generation)
    if not take(run, claim):
        other = read_claim(run, path)
        who = f"process {other.owner.pid} on {other.owner.host}, since {other.since}" if other else "another process"
        raise BusyError(f"{path} is being written by {who}")
    return claim


def read_claim(run: Run, path: str) -> Claim | None:
    """The claim of a path, or None. RecordsError if it cannot be read."""
    return read_lease(run, f"{FOLDER}/{path}.json", Claim, "a claim")


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
