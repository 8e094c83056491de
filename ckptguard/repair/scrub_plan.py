"""What a scrub reads, and in which order: what nobody has read for the longest time comes first."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

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
    last: float | None = None
    begun: Scrub | None = None
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
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, of = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= of:
        raise SettingsError(f"{text!r} is no subset", hint="say 1/7, 2/7 ... 7/7")
    return Subset(number, of)


def scrub_plan(view: RunView, now: float) -> tuple[list[Due], list[Scrub]]:
    """All places of generations with a verdict, the one that nobody has read for the longest time first, and the
    records of readings. Records of what is gone are removed. CouldNotTellError if the run cannot be listed."""
    scrubs = read_scrubs(view.run)
    newest, whole = newest_scrubs(scrubs, now), newest_scrubs([scrub for scrub in scrubs if scrub.is_whole], now)
    places = [*_in_place(view), *_kept(view)]
    here = {due.where for due in places}
    forget_scrubs(view.run, [scrub for scrub in scrubs if scrub.where not in here])
    found = [_dated(view, due, newest.get(due.where), whole.get(due.where)) for due in places]
    found.sort(key=lambda due: (due.last is not None, due.last or 0.0, due.id.series, due.id.order, due.place))
    return found, [scrub for scrub in scrubs if scrub.where in here]


def _in_place(view: RunView) -> Iterator[Due]:
    history = view.history
    newest: dict[tuple[str, int | None], CheckpointId] = {}
    for series in history.names:
        for id in history.standings(series):
            known = newest.get((series, id.step))
            if not history.is_quarantined(id) and (known is None or known.generation < id.generation):
                newest[series, id.step] = id
    for checkpoint in view.checkpoints:
        # By names alone: a run of thousands has gigabytes of manifests. Which generation it is, is looked at again.
        there = newest.get((checkpoint.series, checkpoint.step))
        if there is not None and there in history.sealed(checkpoint.series):
            yield Due(id=there, place=IN_PLACE, path=checkpoint.path, checkpoint=checkpoint)


def _kept(view: RunView) -> Iterator[Due]:
    """Kept copies with bytes of their own: links are read in place, under their other name."""
    for id in list_kept(view.run):
        copy = read_kept(view.run, id)
        if copy is not None and view.history.has_verdict(id) and not shares_place(view.run, copy, copy.files):
            yield Due(id=id, place=KEPT, path=copy.path, last=seconds_of(copy.kept_at))


def _dated(view: RunView, due: Due, newest: Scrub | None, whole: Scrub | None) -> Due:
    """With what is known of readings: of the newest one, and of the newest whole one."""
    since, standing = due.last, view.history.standings(due.id.series).get(due.id)
    if (whole is None and since is None) or (standing is not None and standing.outcome is not Outcome.GOOD):
        verdict = view.history.verdict(due.id)
        since = seconds_of(verdict.checked_at) if verdict is not None else None
    times = [time for time in (whole.began if whole is not None else None, since) if time is not None]
    begun = newest if newest is not None and not newest.is_whole else None
    return msgspec.structs.replace(due, last=max(times, default=None), begun=begun)
