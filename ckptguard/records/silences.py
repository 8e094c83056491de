"""Silences on storage. The newest record counts, by its name, until its time is over.

In doubt a run is not silenced: a message too many is better than one too few.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable

import msgspec

from ckptguard.errors import NotFoundError, RecordsError, SettingsError
from ckptguard.records.run import Run, create_record, has_records, list_records, read_parsed
from ckptguard.records.who_and_when import dated_name, lasts_until
from ckptguard.values.ids import escape
from ckptguard.values.record_formats import PLAIN
from ckptguard.values.silence import CLOCKS, LONGEST, Silence, as_of

FOLDER = "silences"
LONGEST_TEXT = 1000  # characters
_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}\.json")


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    format: int = PLAIN.writes
    run: str = ""  # its id: a copy of a run brings the records along
    began: float
    until: float
    reason: str
    by: str
    at: str


def silence_end(when: str) -> float:
    """Return when a silence ends that lasts until then, or for this span. Raises SettingsError."""
    lasts = lasts_until(when).total_seconds()
    if not 0 < lasts <= LONGEST:
        raise SettingsError("a silence ends within 30 days, so that nobody forgets it")
    return time.time() + lasts


def silence_run(run: Run, until: float, *, reason: str, by: str) -> Silence:
    """Silence a run, instead of any silence before. Raises NotFoundError if it has no records, and StorageError."""
    if not has_records(run):
        raise NotFoundError(f"{run.url} is no run with records", hint="ckptguard verify RUN begins its records")
    before = _names(run)
    name, at = dated_name()
    create_record(
        run,
        f"{FOLDER}/{name}.json",
        _Record(run=run.run_id, began=time.time(), until=until, reason=reason, by=by, at=at),
    )
    _remove(run, before)
    return Silence(until=until, reason=escape(reason), by=escape(by), at=at)


def end_silence(run: Run) -> None:
    """End the silence of a run. Raises NotFoundError if it is not silenced, and StorageError."""
    names = _names(run)
    there = as_of(read_silence(run, names), time.time())
    _remove(run, names)  # also one that a wrong clock put into the future
    if there is None:
        raise NotFoundError(f"{run.url} is not silenced")


def read_silence(run: Run, names: Iterable[str] | None = None) -> Silence | None:
    """Return the newest silence of a run, whether its time is over or not. `names` are those of its records, if they
    are known. Raises StorageError."""
    for name in sorted(_names(run) if names is None else filter(_NAME.fullmatch, names), reverse=True):
        try:
            found = read_parsed(run, f"{FOLDER}/{name}", _Record, "a silence")
        except RecordsError:
            return Silence()
        if found is None:
            continue  # it was ended meanwhile
        if found.format > PLAIN.reads:
            return Silence()
        if found.run != run.run_id or found.began > time.time() + CLOCKS:
            continue  # it is of the run that this one was copied from, or has a wrong clock's time
        reason, by, at = (escape(text[:LONGEST_TEXT]) for text in (found.reason, found.by, found.at))
        return Silence(until=found.until, reason=reason, by=by, at=at)
    return None


def silence_now(run: Run) -> Silence | None:
    """Return what silences a run at this moment, or None. Never raises."""
    with contextlib.suppress(Exception):
        found = read_silence(msgspec.structs.replace(run, records=run.records.now()))
        if found is not None and found.holds(time.time()):
            return found
    return None


def _names(run: Run) -> list[str]:
    return sorted(filter(_NAME.fullmatch, list_records(run, FOLDER)))


def _remove(run: Run, names: Iterable[str]) -> None:
    for name in names:  # the oldest first, so that an older one never counts again
        run.records.remove(f"{FOLDER}/{name}")
