"""Which checkpoint may training go back to? Answered from the records and the presence of files, without reading
tensor bytes: whoever loads it verifies it."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Collection

import msgspec

from ckptguard.decisions.known_good import Standing, choose_known_good
from ckptguard.errors import CouldNotTellError, NoKnownGoodError, ObjectMissingError
from ckptguard.records.kept import KeptCopy, read_kept
from ckptguard.records.names_by_step import ListedSteps
from ckptguard.records.run import Run
from ckptguard.records.trash import list_trashed
from ckptguard.runs.history import History, Key, histories_by_step, load_history
from ckptguard.runs.sealed_content import is_good, kept_matches
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome

IN_PLACE, KEPT, REPLICA = "in place", "kept", "replica"


class KnownGood(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to go back to. `path` is usable as it is; `kept`: it is the protected copy; `place`: "in place",
    "kept" or "replica"."""

    path: str
    series: str
    step: int | None
    id: str
    kept: bool
    verified_at: str
    reason: str
    place: str = IN_PLACE


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A known-good checkpoint with what is needed to use it. `in_place` and `copy` say where it is present."""

    answer: KnownGood
    key: Key
    manifest: Manifest
    in_place: bool
    copy: KeptCopy | None


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
    for history in histories_by_step(run, before_step=before_step, listed=listed):
        found = known_good_candidates(
            run, history, before_step=before_step, series=series, most=1, copies=Copies.IF_NEEDED
        )
        if found:
            return found[0].answer
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
        good = [s for series, s, g in list_trashed(run) if s is not None and is_good(history, series, (s, g))]
        return max((step for step in good if before_step is None or step < before_step), default=None)
    return None


def known_good_candidates(
    run: Run,
    history: History,
    *,
    before_step: int | None = None,
    series: str | None = None,
    exclude: Collection[str] = (),
    most: int | None = None,
    copies: Copies = Copies.ALL,
    unreadable: dict[tuple[str, Key], CouldNotTellError] | None = None,
) -> list[Candidate]:
    """Known-good checkpoints, best first: highest step, then newest generation. CouldNotTellError if that of one cannot
    be told; with `unreadable` it is noted there instead."""
    names = history.names if series is None else {series: history.names.get(series, [])}
    found: list[Candidate] = []
    for name, standing in choose_known_good(names, before_step=before_step, exclude=exclude):
        key = (standing.step, standing.generation)
        try:
            candidate = _candidate(run, history, name, standing, copies) if is_good(history, name, key) else None
        except CouldNotTellError as error:
            if unreadable is None:
                raise
            unreadable[name, key] = error
            continue
        if candidate is not None:
            found.append(candidate)
            if most is not None and len(found) >= most:
                break
    return found


def _candidate(run: Run, history: History, series: str, standing: Standing, copies: Copies) -> Candidate | None:
    key = (standing.step, standing.generation)
    verdict, manifest = history.verdict(series, key), history.manifest(series, key)
    if verdict is None or manifest is None:
        return None
    damaged = verdict.outcome is not Outcome.GOOD
    in_place = (
        not damaged
        and history.current_if_readable(series, standing.step, manifest.path) == key
        and all(_has_size(run, f.path, f.size) for f in manifest.files)
    )
    asked = history.may_be_kept(series, key) and (copies is Copies.ALL or not in_place)
    copy = read_kept(run, series, *key) if asked else None
    if copy is not None and not kept_matches(run, copy, manifest):
        copy = None
    if not in_place and copy is None:
        return None
    if in_place:
        path, reason = run.usable(manifest.path), f"verified {verdict.checked_at}, in place"
    else:
        assert copy is not None
        why = "its place is damaged" if damaged else "it is no longer in place"
        path, reason = run.usable_record(copy.checkpoint_key), f"verified; {why}, this is the kept copy"
    answer = KnownGood(
        path=path,
        series=series,
        step=standing.step,
        id=standing.id,
        kept=not in_place,
        verified_at=verdict.checked_at,
        reason=reason,
        place=IN_PLACE if in_place else KEPT,
    )
    return Candidate(answer=answer, key=key, manifest=manifest, in_place=in_place, copy=copy)


def _has_size(run: Run, key: str, size: int) -> bool:
    try:
        entry = run.storage.stat(key)
    except ObjectMissingError:
        return False
    return entry.kind == "file" and entry.size == size
