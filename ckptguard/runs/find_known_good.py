"""Find the checkpoint to go back to, from the records and the presence of files. The caller must verify it on
loading: this module reads no tensor bytes."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from ckptguard.decisions.known_good import (
    IN_PLACE,
    is_ahead,
    series_head_of,
)
from ckptguard.errors import CouldNotTellError, NoKnownGoodError
from ckptguard.records.run import Run, has_records
from ckptguard.runs.good_checkpoint import (
    ANY,
    SURE,
    Candidate,
    KnownGood,
    Presence,
    SavePart,
    Wanted,
    candidate_of,
    full_first,
    presence_of,
)
from ckptguard.runs.history import History, load_history, names_alone
from ckptguard.values.ids import CheckpointId, escape, folder_of
from ckptguard.values.manifest import Manifest

if TYPE_CHECKING:
    from ckptguard.runs.run_view import RunView  # an answer from the records needs no listing

__all__ = [
    "ANY",
    "SURE",
    "Candidate",
    "KnownGood",
    "Presence",
    "SavePart",
    "Wanted",
    "best_on_record",
    "candidate_of",
    "find_known_good",
    "full_first",
    "is_newer",
    "known_good_candidates",
    "newest_candidate",
    "none_found",
    "openable",
    "presence_of",
    "ranked_candidates",
]

REPLICA = "replica"
_GENERATION = attrgetter("generation")


def find_known_good(run: Run, *, before_step: int | None = None, series: str | None = None) -> KnownGood:
    """Return the newest GOOD checkpoint that is present and unchanged since its bytes were read.

    `before_step` is exclusive. Without `series`, `best_moments` compares the newest ones of all series. Raises
    NoKnownGoodError if there is none.
    """
    return openable(best_on_record(run, Wanted(before_step=before_step, series=series, sure=True)).answer)


def openable(answer: KnownGood) -> KnownGood:
    """Return the answer with a path that a loader can open.

    Files in the records do not have the trainer's names. A kept copy therefore gets a folder of links with those names,
    outside the run. If that fails, the path is the copy itself.
    """
    if answer.save:
        parts = tuple(msgspec.structs.replace(p, path=_openable(p.path, p.place)) for p in answer.save)
        answer = msgspec.structs.replace(answer, save=parts)
    if answer.place == IN_PLACE:
        return answer
    return msgspec.structs.replace(answer, path=_openable(answer.path, answer.place))


def _openable(path: str, place: str) -> str:
    if place == IN_PLACE or "://" in path:
        return path
    from ckptguard.storage.local.linked_view import linked_view  # few answers need it

    with contextlib.suppress(OSError):
        return linked_view(path, os.environ)
    return path


def best_on_record(run: Run, wanted: Wanted, history: History | None = None) -> Candidate:
    """Return the best known-good checkpoint with as few reads as possible. Raises NoKnownGoodError, or StorageError if
    only some that cannot be looked at are left."""
    history = names_alone(run) if history is None else history
    found = next(_best_first(history, wanted, every_copy=False), None)
    if found is None:
        raise next(iter(history.unread.values()), None) or none_found(run, wanted.before_step)
    return found


def none_found(run: Run, before_step: int | None) -> NoKnownGoodError:
    """Return the error to raise if there is none. Its hint says if nothing was ever recorded, or names a good
    checkpoint in the trash."""
    before = f" before step {before_step}" if before_step is not None else ""
    step = _good_in_trash(run, before_step)
    place = shlex.quote(run.url)
    hint = f"run `ckptguard verify {place}` to see what there is"
    if step is not None:
        hint = f"a good one is in the trash; get it with: ckptguard restore {place} --step {step} --to DEST"
    elif (thin := _thinned(run, before_step)) is not None:
        what = escape(thin.manifest.path)
        hint = (
            f"{what} is good, but thinned: a resume would restart its {', '.join(thin.answer.thinned)}."
            f" For its weights, run: ckptguard restore {place}{_step_option(thin.id)} --to DEST"
        )
    elif began_with := _inputs_of(run):
        hint = f"training began with {escape(began_with)} and did not save it: nothing goes back to it. Train from it"
    elif alone := _good_alone(run, before_step):
        hint = (
            f"{escape(alone.path)} is good, but no whole save is;"
            f" go back to it alone with: ckptguard rollback {place} --only {shlex.quote(alone.series)}"
        )
    elif _has_no_records(run):  # a lone file may have been verified outside a run, which records nothing
        hint = f"nothing is on record; verify and record what there is with: ckptguard-daemon --once {place}"
        if _is_empty(run):
            hint = "there is no checkpoint in it yet; check the path, or wait for the first save"
    return NoKnownGoodError(f"{run.url} has no known-good checkpoint{before}", hint=hint)


def _step_option(id: CheckpointId) -> str:
    return "" if id.number is None else f" --step {id.number}"


def _good_alone(run: Run, before_step: int | None) -> Manifest | None:
    """Return a good checkpoint with weights that is no whole save, or None."""
    with contextlib.suppress(CouldNotTellError):
        history = load_history(run)
        for series in history.series:
            wanted = Wanted(series=series, before_step=before_step, sure=True)
            found = next(_best_first(history, wanted, every_copy=False), None)
            if found is not None and series_head_of(found.manifest).has_weights:
                return found.manifest
    return None


def _thinned(run: Run, before_step: int | None) -> Candidate | None:
    """Return the best checkpoint that is good, but was thinned; or None."""
    with contextlib.suppress(CouldNotTellError):
        wanted = Wanted(before_step=before_step, sure=True, thinned=True)
        return next(_best_first(load_history(run), wanted, every_copy=False), None)
    return None


def _inputs_of(run: Run) -> str:
    """Return the path of good weights that a training began with, or ""."""
    from ckptguard.runs.saved_together import RecordedSaves, inputs_of  # only where there is no answer

    with contextlib.suppress(CouldNotTellError):
        return next(iter(inputs_of(RecordedSaves(load_history(run), ANY, every_copy=False))), "")
    return ""


def _is_empty(run: Run) -> bool:
    """True if no checkpoint is there, and that can be told."""
    from ckptguard.runs.run_view import list_run  # an answer needs no listing

    with contextlib.suppress(CouldNotTellError):
        return not list_run(run).checkpoints
    return False


def _has_no_records(run: Run) -> bool:
    """True if nothing was ever recorded of the run, and that can be told."""
    with contextlib.suppress(CouldNotTellError):
        return not has_records(run)
    return False


def _good_in_trash(run: Run, before_step: int | None) -> int | None:
    """Return the newest good step in the trash, or None if there is none or it cannot be read."""
    from ckptguard.records.trash import list_trashed  # only where there is no answer

    with contextlib.suppress(CouldNotTellError):
        history = load_history(run)
        good = [id.number for id in list_trashed(run) if id.number is not None and history.is_good(id)]
        return max((step for step in good if before_step is None or step < before_step), default=None)
    return None


def known_good_candidates(view: RunView, wanted: Wanted = ANY) -> Iterator[Candidate]:
    """Yield known-good checkpoints, best first; `best_moments` orders those of several series.

    Each one is searched for only when it is asked for. Raises CouldNotTellError if one cannot be read.
    """
    return _best_first(view.history, wanted, every_copy=True)


def newest_candidate(view: RunView, wanted: Wanted = ANY) -> Candidate | None:
    """The best known-good checkpoint, or None."""
    return next(known_good_candidates(view, wanted), None)


def ranked_candidates(history: History, wanted: Wanted = ANY) -> list[CheckpointId]:
    """Return the ids that may be known-good, by the names of the records alone.

    The newest of each series come first. Across series the highest steps come first, which does not mean the newest.
    """
    return sorted((id for ids in _ranked(history, wanted) for id in ids), key=lambda id: id.order, reverse=True)


def _ranked(history: History, wanted: Wanted) -> list[Iterator[CheckpointId]]:
    """Return for each series the ids that may be known-good, newest first. No name is parsed before it is needed.

    Each was GOOD at some time. If its files were damaged later, a copy may still be whole, which only its entry says.
    """
    named = wanted.series if wanted.only is None else wanted.only.series
    return [
        (
            id
            for step in history.steps(series, wanted.before_step)
            for id in sorted(step.was_good, key=_GENERATION, reverse=True)
            if id not in wanted.exclude and wanted.only in (None, id) and wanted.includes(id)
        )
        for series in (history.series if named is None else (named,))
        if (wanted.folders is None or folder_of(series) in wanted.folders)
        and (wanted.among is None or series in wanted.among)
    ]


def _best_first(history: History, wanted: Wanted, *, every_copy: bool) -> Iterator[Candidate]:
    """Yield the candidates, the best first: of one series the newest, of several as `best_moments` says."""
    ranked = _ranked(history, wanted)
    if len(ranked) == 1:
        found = (candidate_of(history, id, wanted, every_copy=every_copy) for id in ranked[0])
        yield from full_first(filter(None, found), wanted)
    elif ranked:
        from ckptguard.runs.saved_together import RecordedSaves, best_moments  # of one series nobody needs it

        series = [one for one in history.series if wanted.is_of(one)]
        yield from full_first(best_moments(RecordedSaves(history, wanted, every_copy=every_copy), series), wanted)


def is_newer(one: Candidate, other: Candidate) -> bool:
    """True if the first known-good checkpoint is surely better than the other. Of two equal ones the nearer will do."""
    if one.id.series == other.id.series:
        return one.id.order > other.id.order
    return is_ahead(series_head_of(one.manifest), series_head_of(other.manifest))
