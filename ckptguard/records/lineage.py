"""Which runs belong to one training: a run and its replicas have equal records of it.

A replica is filled only from a run of its own lineage, and helps no other one. So two trainings never mix, even if one
was started in the folder of another.
"""

from __future__ import annotations

import uuid

import msgspec

from ckptguard.errors import CouldNotTellError, RecordsError
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.run import Run, list_records, read_parsed, write_once
from ckptguard.storage.redaction import plain_url
from ckptguard.values.record_formats import PLAIN

KEY = "lineage.json"


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """`token` is random. `begun` is the URL of the first run, without user and query, for people."""

    format: int = PLAIN.writes
    token: str
    begun: str


def read_lineage(run: Run) -> Lineage | None:
    """Return the run's lineage, or None. Raises RecordsError if it cannot be read."""
    return read_parsed(run, KEY, Lineage, "the record of the run's lineage")


def begin_lineage(run: Run) -> Lineage:
    """Return the run's lineage. A new one begins if there is none."""
    known = read_lineage(run)
    if known is not None:
        return known
    join_lineage(run, Lineage(token=uuid.uuid4().hex, begun=plain_url(run.url)))
    found = read_lineage(run)  # that of a concurrent process may have come first
    if found is None:
        raise RecordsError(f"the lineage of {run.url} was written but cannot be read back")
    return found


def refuse_another(run: Run, other: Run) -> None:
    """Raise CouldNotTellError if `other` holds another training than `run`.

    One without recorded checkpoints may still become any. Raises RecordsError if a record cannot be read.
    """
    ours, theirs = read_lineage(run), read_lineage(other)
    if (ours and ours.token) == (theirs and theirs.token):
        return
    if all(lineage or list_records(one, MANIFESTS) for one, lineage in ((run, ours), (other, theirs))):
        raise another_run(other, theirs)


def another_run(other: Run, lineage: Lineage | None) -> CouldNotTellError:
    """Return the error for a place that holds another training."""
    if lineage is None:
        return CouldNotTellError(f"{other.url} is another run", hint="replicate to another place")
    return CouldNotTellError(
        f"{other.url} belongs to another training (started in {lineage.begun})",
        hint="replicate each training to its own place",
    )


def join_lineage(run: Run, lineage: Lineage) -> None:
    """Record that a run has this lineage, unless it has one."""
    write_once(run, KEY, lineage)
