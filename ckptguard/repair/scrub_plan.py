"""What a scrub reads, and in which order: what nobody has read for the longest time comes first."""

from __future__ import annotations

import hashlib

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.keep.copies import shares_place
from ckptguard.layouts import Checkpoint
from ckptguard.records.elapsed import seconds_of
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.run import Run
from ckptguard.records.scrubs import IN_PLACE, KEPT, Scrub, Where, forget_scrubs, newest_scrubs, read_scrubs
from ckptguard.runs.history import History, Key
from ckptguard.runs.listing import list_checkpoints
from ckptguard.values.ids import checkpoint_id
from ckptguard.values.verdict import Outcome


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one generation that has a verdict. `last`: when a reading of all of it began, in seconds since
    1970; None where that is not known. `begun`: a reading that was cut short. `checkpoint` is what lies in place."""

    series: str
    key: Key
    place: str
    path: str
    last: float | None
    begun: Scrub | None
    checkpoint: Checkpoint | None = None

    @property
    def where(self) -> Where:
        """What is read."""
        return self.series, self.key, self.place

    @property
    def id(self) -> str:
        """``<step>.<generation>``."""
        return checkpoint_id(*self.key)


class Subset(msgspec.Struct, frozen=True):
    """The `number`-th of `of` parts of all checkpoints; each is always in the same part."""

    number: int
    of: int

    def holds(self, due: Due) -> bool:
        """Whether a generation is in this part."""
        digest = hashlib.sha256(f"{due.series}/{due.id}".encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") % self.of == self.number - 1


def parse_subset(text: str) -> Subset:
    """``n/t``. SettingsError."""
    number, slash, of = text.partition("/")
    plain = slash and all(part.isascii() and part.isdigit() and len(part) < 7 for part in (number, of))
    if not plain or not 1 <= int(number) <= int(of):
        raise SettingsError(f"{text!r} is no subset", hint="say 1/7, 2/7 ... 7/7")
    return Subset(int(number), int(of))


def scrub_plan(run: Run, history: History, now: float) -> tuple[list[Due], list[Scrub]]:
    """All places of generations with a verdict, the one that nobody has read for the longest time first, and the
    records of readings. Records of what is gone are removed. CouldNotTellError if the run cannot be listed."""
    scrubs = read_scrubs(run)
    newest = newest_scrubs(scrubs, now)
    whole = newest_scrubs([s for s in scrubs if s.is_whole], now)
    found = [*_in_place(run, history, newest, whole), *_kept(run, history, newest, whole)]
    here = {due.where for due in found}
    gone = [scrub for scrub in scrubs if scrub.where not in here]
    forget_scrubs(run, gone)
    return sorted(found, key=_order), [scrub for scrub in scrubs if scrub not in gone]


def _order(due: Due) -> tuple[object, ...]:
    return due.last is not None, due.last or 0.0, due.series, due.key[0] or 0, due.key[1], due.place


def _in_place(run: Run, history: History, newest: dict[Where, Scrub], whole: dict[Where, Scrub]) -> list[Due]:
    by_step: dict[tuple[str, int | None], int] = {}
    for series in history.names:
        aside = history.quarantined.get(series, ())
        for key in history.standings(series):
            if key not in aside:
                by_step[series, key[0]] = max(by_step.get((series, key[0]), 0), key[1])
    found = []
    for checkpoint in list_checkpoints(run):
        # By names alone: a run of thousands has gigabytes of manifests. Which generation it is, is looked at again.
        generation = by_step.get((checkpoint.series, checkpoint.step))
        if generation is not None and (checkpoint.step, generation) in history.sealed(checkpoint.series):
            key = (checkpoint.step, generation)
            where = (checkpoint.series, key, IN_PLACE)
            found.append(_due(history, where, checkpoint.path, newest, whole, checkpoint=checkpoint))
    return found


def _kept(run: Run, history: History, newest: dict[Where, Scrub], whole: dict[Where, Scrub]) -> list[Due]:
    found = []
    for series, step, generation in list_kept(run):
        copy = read_kept(run, series, step, generation)
        known = copy is not None and (step, generation) in history.standings(series)
        if (
            copy is not None and known and not shares_place(run, copy, copy.files)
        ):  # read in place, under its other name
            where = (series, (step, generation), KEPT)
            found.append(_due(history, where, copy.path, newest, whole, since=seconds_of(copy.kept_at)))
    return found


def _due(
    history: History,
    where: Where,
    path: str,
    newest: dict[Where, Scrub],
    whole: dict[Where, Scrub],
    *,
    since: float | None = None,
    checkpoint: Checkpoint | None = None,
) -> Due:
    last, begun = whole.get(where), newest.get(where)
    standing = history.standings(where[0]).get(where[1])
    if (last is None and since is None) or (standing is not None and standing.outcome is not Outcome.GOOD):
        verdict = history.verdict(where[0], where[1])
        since = seconds_of(verdict.checked_at) if verdict is not None else None
    return Due(
        series=where[0],
        key=where[1],
        place=where[2],
        path=path,
        last=max((t for t in (last.began if last is not None else None, since) if t is not None), default=None),
        begun=begun if begun is not None and not begun.is_whole else None,
        checkpoint=checkpoint,
    )
