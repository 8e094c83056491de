"""What a scrub reads, and in which order: what nobody has read for the longest time comes first."""

from __future__ import annotations

import hashlib

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.keep.copies import shares_place
from ckptguard.layouts import Checkpoint
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.scrubs import IN_PLACE, KEPT, Scrub, Where, forget_scrubs, newest_scrubs, read_scrubs
from ckptguard.records.who_and_when import seconds_of
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one generation that has a verdict. `last`: when a reading of all of it began, in seconds since
    1970; None where that is not known. `begun`: a reading that was cut short. `checkpoint` is what lies in place."""

    id: CheckpointId
    place: str
    path: str
    last: float | None
    begun: Scrub | None
    checkpoint: Checkpoint | None = None

    @property
    def where(self) -> Where:
        """What is read."""
        return self.id, self.place


class Subset(msgspec.Struct, frozen=True):
    """The `number`-th of `of` parts of all checkpoints; each is always in the same part."""

    number: int
    of: int

    def holds(self, due: Due) -> bool:
        """Whether a generation is in this part."""
        digest = hashlib.sha256(f"{due.id.series}/{due.id}".encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") % self.of == self.number - 1


def parse_subset(text: str) -> Subset:
    """``n/t``. SettingsError."""
    number, slash, of = text.partition("/")
    plain = slash and all(part.isascii() and part.isdigit() and len(part) < 7 for part in (number, of))
    if not plain or not 1 <= int(number) <= int(of):
        raise SettingsError(f"{text!r} is no subset", hint="say 1/7, 2/7 ... 7/7")
    return Subset(int(number), int(of))


class _Readings(msgspec.Struct, frozen=True):
    """What the records say of earlier readings, by place: the newest of each, and the newest whole one."""

    newest: dict[Where, Scrub]
    whole: dict[Where, Scrub]


def scrub_plan(view: RunView, now: float) -> tuple[list[Due], list[Scrub]]:
    """All places of generations with a verdict, the one that nobody has read for the longest time first, and the
    records of readings. Records of what is gone are removed. CouldNotTellError if the run cannot be listed."""
    scrubs = read_scrubs(view.run)
    readings = _Readings(newest_scrubs(scrubs, now), newest_scrubs([s for s in scrubs if s.is_whole], now))
    found = [*_in_place(view, readings), *_kept(view, readings)]
    here = {due.where for due in found}
    forget_scrubs(view.run, [scrub for scrub in scrubs if scrub.where not in here])
    return sorted(found, key=_order), [scrub for scrub in scrubs if scrub.where in here]


def _order(due: Due) -> tuple[object, ...]:
    return due.last is not None, due.last or 0.0, due.id.series, due.id.order, due.place


def _in_place(view: RunView, readings: _Readings) -> list[Due]:
    history = view.history
    newest: dict[tuple[str, int | None], CheckpointId] = {}
    for series in history.names:
        for id in history.standings(series):
            known = newest.get((series, id.step))
            if not history.is_quarantined(id) and (known is None or known.generation < id.generation):
                newest[series, id.step] = id
    found = []
    for checkpoint in view.checkpoints:
        # By names alone: a run of thousands has gigabytes of manifests. Which generation it is, is looked at again.
        there = newest.get((checkpoint.series, checkpoint.step))
        if there is not None and there in history.sealed(checkpoint.series):
            due = _due(view, (there, IN_PLACE), checkpoint.path, readings)
            found.append(msgspec.structs.replace(due, checkpoint=checkpoint))
    return found


def _kept(view: RunView, readings: _Readings) -> list[Due]:
    found = []
    for id in list_kept(view.run):
        copy = read_kept(view.run, id)
        if copy is None or not view.history.has_verdict(id) or shares_place(view.run, copy, copy.files):
            continue  # links are read in place, under their other name
        found.append(_due(view, (id, KEPT), copy.path, readings, since=seconds_of(copy.kept_at)))
    return found


def _due(view: RunView, where: Where, path: str, readings: _Readings, *, since: float | None = None) -> Due:
    last, begun, id = readings.whole.get(where), readings.newest.get(where), where[0]
    standing = view.history.standings(id.series).get(id)
    if (last is None and since is None) or (standing is not None and standing.outcome is not Outcome.GOOD):
        verdict = view.history.verdict(id)
        since = seconds_of(verdict.checked_at) if verdict is not None else None
    return Due(
        id=id,
        place=where[1],
        path=path,
        last=max((t for t in (last.began if last is not None else None, since) if t is not None), default=None),
        begun=begun if begun is not None and not begun.is_whole else None,
    )
