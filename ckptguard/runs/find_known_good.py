"""Which checkpoint may training go back to? Answered from the records and the presence of files, without reading
tensor bytes: whoever loads it verifies it."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from ckptguard.decisions.candidates import IN_PLACE, KEPT
from ckptguard.decisions.known_good import choose_known_good
from ckptguard.errors import CouldNotTellError, NoKnownGoodError, ObjectMissingError
from ckptguard.records.kept import KeptCopy, read_kept
from ckptguard.records.names_by_step import ListedSteps
from ckptguard.records.run import Run
from ckptguard.records.trash import list_trashed
from ckptguard.runs.history import History, histories_by_step, load_history
from ckptguard.runs.sealed_content import Judged, Sealed, is_good, kept_matches
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome

if TYPE_CHECKING:
    from ckptguard.runs.run_view import RunView  # it lists, and an answer from the records needs none of that

REPLICA = "replica"


class KnownGood(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to go back to. `path` is usable as it is; `kept`: it is the protected copy; `place`: "in place",
    "kept" or "replica"."""

    path: str
    id: CheckpointId
    kept: bool
    verified_at: str
    reason: str
    place: str = IN_PLACE

    @property
    def series(self) -> str:
        """The series that it belongs to."""
        return self.id.series

    @property
    def step(self) -> int | None:
        """The step that it was saved at."""
        return self.id.step


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A known-good checkpoint with what is needed to use it. `in_place` and `copy` say where it is present."""

    answer: KnownGood
    manifest: Manifest
    in_place: bool
    copy: KeptCopy | None

    @property
    def id(self) -> CheckpointId:
        """Which checkpoint it is."""
        return self.answer.id


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a known-good checkpoint lies, and what to say of it."""

    answer: KnownGood
    in_place: bool
    copy: KeptCopy | None


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which known-good checkpoints may be taken: those before a step (exclusive), of one series, but for some.
    `step` asks for those of one step, `only` for one checkpoint and no other."""

    before_step: int | None = None
    series: str | None = None
    exclude: frozenset[CheckpointId] = frozenset()
    step: int | None = None
    only: CheckpointId | None = None


ANY = Wanted()


class Copies(enum.Enum):
    """Whether the kept copy is looked for."""

    ALL = "all"
    IF_NEEDED = "if needed"  # only of what is not in place


def find_known_good(
    run: Run, *, before_step: int | None = None, series: str | None = None, listed: ListedSteps | None = None
) -> KnownGood:
    """The newest GOOD checkpoint, not SUSPECT, that is present. `before_step` is exclusive.

    Without `series` the highest step of all series wins. NoKnownGoodError if there is none. `listed`: the names in the
    records, if they are known; all else is asked of storage.
    """
    wanted = Wanted(before_step=before_step, series=series)
    for history in histories_by_step(run, before_step=before_step, listed=listed):
        for found in candidates_in(history, wanted, copies=Copies.IF_NEEDED):
            return found.answer
    raise none_found(run, before_step)


def none_found(run: Run, before_step: int | None) -> NoKnownGoodError:
    """What to raise where there is none. What retention removed and is still in the trash is named in the hint."""
    before = f" before step {before_step}" if before_step is not None else ""
    step = _good_in_trash(run, before_step)
    hint = (
        f"ckptguard verify {run.url} says what there is"
        if step is None
        else f"a good one is in the trash: ckptguard restore {run.url} --step {step} --to DEST"
    )
    return NoKnownGoodError(f"{run.url} has no known-good checkpoint{before}", hint=hint)


def _good_in_trash(run: Run, before_step: int | None) -> int | None:
    """The newest good step in the trash, if that can be told."""
    with contextlib.suppress(CouldNotTellError):
        history = load_history(run)
        good = [id.step for id in list_trashed(run) if id.step is not None and is_good(history, id)]
        return max((step for step in good if before_step is None or step < before_step), default=None)
    return None


def known_good_candidates(view: RunView, wanted: Wanted = ANY) -> Iterator[Candidate]:
    """Known-good checkpoints, best first: highest step, then newest generation. Each is looked for when it is asked
    for. CouldNotTellError if that of one cannot be told."""
    return candidates_in(view.history, wanted)


def newest_candidate(view: RunView, wanted: Wanted = ANY) -> Candidate | None:
    """The best known-good checkpoint, or None."""
    return next(known_good_candidates(view, wanted), None)


def candidates_in(history: History, wanted: Wanted = ANY, *, copies: Copies = Copies.ALL) -> Iterator[Candidate]:
    """The same from a history."""
    for id in ranked_candidates(history, wanted):
        candidate = candidate_of(history, id, copies=copies)
        if candidate is not None:
            yield candidate


def ranked_candidates(history: History, wanted: Wanted = ANY) -> list[CheckpointId]:
    """The ids that may be known-good by the names of the records, best first. Nothing is read."""
    series = wanted.series if wanted.only is None else wanted.only.series
    names = history.names if series is None else {series: history.names.get(series, {})}
    found = (s.id for s in choose_known_good(names, before_step=wanted.before_step, exclude=wanted.exclude))
    return [id for id in found if wanted.step in (None, id.step) and wanted.only in (None, id)]


def candidate_of(history: History, id: CheckpointId, *, copies: Copies = Copies.ALL) -> Candidate | None:
    """The checkpoint, if it is good and present. CouldNotTellError if that cannot be told."""
    if not is_good(history, id):
        return None
    verdict, manifest = history.verdict(id), history.manifest(id)
    if verdict is None or manifest is None:
        return None
    found = presence_of(history, id, verdict, manifest, copies=copies)
    if found is None:
        return None
    return Candidate(answer=found.answer, manifest=manifest, in_place=found.in_place, copy=found.copy)


def presence_of(
    history: History,
    id: CheckpointId,
    verdict: Judged,
    sealed: Sealed,
    *,
    copies: Copies = Copies.ALL,
    path_of: Callable[[CheckpointId], str | None] | None = None,
) -> Presence | None:
    """Where a checkpoint lies whose sealed bytes are good; None if it is gone. `path_of` as for `History.current`."""
    run = history.run
    damaged = verdict.outcome is not Outcome.GOOD
    in_place = (
        not damaged
        and history.current_if_readable(id.series, id.step, sealed.path, path_of=path_of) == id
        and all(_has_size(run, f.path, f.size) for f in sealed.files)
    )
    asked = history.may_be_kept(id) and (copies is Copies.ALL or not in_place)
    copy = read_kept(run, id) if asked else None
    if copy is not None and not kept_matches(run, copy, sealed):
        copy = None
    if in_place:
        path, reason = run.usable(sealed.path), f"verified {verdict.checked_at}, in place"
    elif copy is not None:
        why = "its place is damaged" if damaged else "it is no longer in place"
        path, reason = run.usable_record(copy.checkpoint_key), f"verified; {why}, this is the kept copy"
    else:
        return None
    answer = KnownGood(
        path=path,
        id=id,
        kept=not in_place,
        verified_at=verdict.checked_at,
        reason=reason,
        place=IN_PLACE if in_place else KEPT,
    )
    return Presence(answer=answer, in_place=in_place, copy=copy)


def _has_size(run: Run, key: str, size: int) -> bool:
    try:
        entry = run.storage.stat(key)
    except ObjectMissingError:
        return False
    return entry.kind == "file" and entry.size == size
