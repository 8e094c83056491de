"""Raise the format of a run's records. Only a person asks for it: older versions then refuse the run."""

from __future__ import annotations

import msgspec

from ckptguard.errors import NotFoundError
from ckptguard.records.run import Run, raise_format, read_format
from ckptguard.runs.lock import run_lock
from ckptguard.values.record_formats import CHANGES


class Migrated(msgspec.Struct, frozen=True, kw_only=True):
    """`changes` says what comes with each format above `format`. `raised`: the run has format `to` now."""

    format: int
    to: int
    changes: tuple[str, ...]
    raised: bool


def migrate(run: Run, *, dry_run: bool) -> Migrated:
    """Raise the records of a run to the format of new runs. Existing records stay as they are.

    Raises NotFoundError if the run has no records, BusyError if another process moves files of it.
    """
    planned = _plan(run)
    if dry_run or planned.to == planned.format:
        return planned
    with run_lock(run):
        planned = _plan(run)  # another process may have been faster
        if planned.to > planned.format:
            raise_format(run, planned.to)
    return msgspec.structs.replace(planned, raised=planned.to > planned.format)


def _plan(run: Run) -> Migrated:
    found = read_format(run)
    if found is None:
        raise NotFoundError(f"{run.url} has no records", hint="ckptguard verify RUN begins them")
    to = max(found, run.new_format)
    changes = tuple(text for number, text in CHANGES.items() if found < number <= to)
    return Migrated(format=found, to=to, changes=changes, raised=False)
