"""Find the checkpoint to go back to, from the records and the presence of files. The caller must verify it on
loading: this module reads no tensor bytes."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from ckptguard.decisions.known_good import (
    IN_PLACE,
    KEPT,
    choose_series,
    is_ahead,
    standpoint_of,
)
from ckptguard.errors import CouldNotTellError, NoKnownGoodError, RecordsError
from ckptguard.records.kept import KeptCopy, read_kept
from ckptguard.records.run import Run, has_records
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.history import History, load_history, names_alone
from ckptguard.runs.sealed_content import Judged, Sealed, kept_matches
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import CheckpointId, Step, folder_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome

if TYPE_CHECKING:
    from ckptguard.runs.run_view import RunView  # an answer from the records needs no listing

REPLICA = "replica"
_GENERATION = attrgetter("generation")


class KnownGood(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to go back to. `path` can be opened as it is. `place` is "in place", "kept" or "replica"."""

    path: str
    id: CheckpointId
    kept: bool
    verified_at: str
    reason: str
    place: str = IN_PLACE

    @property
    def series(self) -> str:
        """The series of the checkpoint."""
        return self.id.series

    @property
    def step(self) -> Step:
        """The step that its name states."""
        return self.id.step


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a known-good checkpoint, and the answer that describes it.

    `changed`: the files in place have the sealed sizes, but storage describes them differently than when they were
    read. Read such files again before you call them good.
    """

    answer: KnownGood
    in_place: bool
    changed: bool
    copy: KeptCopy | None

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint."""
        return self.answer.id


class Candidate(Presence, frozen=True, kw_only=True):
    """A known-good checkpoint with the manifest that its use needs."""

    manifest: Manifest


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which known-good checkpoints may be taken. `before_step` is exclusive; `only` allows a single checkpoint.

    A name without a single number takes its step from a counter inside. Without one it is before no step. With `sure`,
    files that changed since they were read count as gone: use it if you do not read them.
    """

    before_step: int | None = None
    series: str | None = None
    folders: frozenset[str] | None = None
    exclude: frozenset[CheckpointId] = frozenset()
    step: int | None = None
    only: CheckpointId | None = None
    sure: bool = False

    def is_of(self, series: str) -> bool:
        """True if checkpoints of this series may be wanted."""
        return self.series in (None, series) and (self.folders is None or folder_of(series) in self.folders)

    def includes(self, id: CheckpointId, manifest: Manifest | None = None) -> bool:
        """True if a checkpoint with this step is wanted. Of a name without a number only its manifest says that."""
        if self.before_step is None and self.step is None:
            return True
        step = id.number if manifest is None else manifest.training_step
        if step is None:
            return manifest is None
        return (self.before_step is None or step < self.before_step) and self.step in (None, step)


ANY = Wanted()
SURE = Wanted(sure=True)


def find_known_good(run: Run, *, before_step: int | None = None, series: str | None = None) -> KnownGood:
    """Return the newest GOOD checkpoint that is present and unchanged since its bytes were read.

    `before_step` is exclusive. Without `series`, the newest ones of all series are compared by `choose_series`. Raises
    NoKnownGoodError if there is none.
    """
    return openable(best_on_record(run, Wanted(before_step=before_step, series=series, sure=True)).answer)


def openable(answer: KnownGood) -> KnownGood:
    """Return the answer with a path that a loader can open.

    Files in the records do not have the trainer's names. A kept copy therefore gets a folder of links with those names,
    outside the run. If that fails, the path is the copy itself.
    """
    if answer.place == IN_PLACE or "://" in answer.path:
        return answer
    from ckptguard.storage.local.linked_view import linked_view  # few answers need it

    with contextlib.suppress(OSError):
        return msgspec.structs.replace(answer, path=linked_view(answer.path, os.environ))
    return answer


def best_on_record(run: Run, wanted: Wanted, history: History | None = None) -> Candidate:
    """Return the best known-good checkpoint with as few reads as possible. Raises NoKnownGoodError."""
    history = names_alone(run) if history is None else history
    found = next(_best_first(history, wanted, every_copy=False), None)
    if found is None:
        raise none_found(run, wanted.before_step)
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
    elif _has_no_records(run):  # a lone file may have been verified outside a run, which records nothing
        hint = f"nothing is on record; verify and record what there is with: ckptguard-daemon --once {place}"
        if _is_empty(run):
            hint = "there is no checkpoint in it yet; check the path, or wait for the first save"
    return NoKnownGoodError(f"{run.url} has no known-good checkpoint{before}", hint=hint)


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
    """Yield known-good checkpoints, best first; `choose_series` orders those of several series.

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
        if wanted.folders is None or folder_of(series) in wanted.folders
    ]


def _best_first(history: History, wanted: Wanted, *, every_copy: bool) -> Iterator[Candidate]:
    """Yield the candidates of all series, each newest first, in one order."""
    every = [
        filter(None, (candidate_of(history, id, wanted, every_copy=every_copy) for id in ids))
        for ids in _ranked(history, wanted)
    ]
    heads = [(head, series) for series in every if (head := next(series, None)) is not None]
    while heads:
        several = len(heads) > 1
        chosen, why = choose_series([standpoint_of(head.manifest) for head, _ in heads]) if several else (0, "")
        best, series = heads.pop(chosen)
        if why:
            answer = msgspec.structs.replace(best.answer, reason=f"{best.answer.reason}; {why}")
            best = msgspec.structs.replace(best, answer=answer)
        yield best
        if (head := next(series, None)) is not None:
            heads.insert(chosen, (head, series))


def is_newer(one: Candidate, other: Candidate) -> bool:
    """True if the first known-good checkpoint is surely better than the other. Of two equal ones the nearer will do."""
    if one.id.series == other.id.series:
        return one.id.order > other.id.order
    return is_ahead(standpoint_of(one.manifest), standpoint_of(other.manifest))


def candidate_of(
    history: History, id: CheckpointId, wanted: Wanted = ANY, *, every_copy: bool = True
) -> Candidate | None:
    """Return the checkpoint if it is good, present, and of a wanted step; else None. Raises CouldNotTellError."""
    verdict = history.good_verdict(id)
    manifest = history.manifest(id) if verdict is not None else None
    if verdict is None or manifest is None or not wanted.includes(id, manifest):
        return None
    found = presence_of(history, id, verdict, manifest, every_copy=every_copy, sure=wanted.sure)
    return None if found is None else Candidate(**msgspec.structs.asdict(found), manifest=manifest)


def presence_of(
    history: History,
    id: CheckpointId,
    verdict: Judged,
    sealed: Sealed,
    *,
    every_copy: bool = True,
    sure: bool = False,
    path_of: Callable[[CheckpointId], str | None] | None = None,
) -> Presence | None:
    """Return where a checkpoint with good sealed bytes is, or None if it is gone.

    `path_of` is as in `History.current`, and `sure` as in `Wanted`.
    """
    run = history.run
    in_place, why = False, "the file in place is damaged"
    if verdict.outcome is Outcome.GOOD:
        with contextlib.suppress(RecordsError):  # a manifest that cannot be read may be of the files in place
            in_place = history.current(id.series, id.step, sealed.path, path_of=path_of) == id
        why = "it is no longer in place"
    there = [find_entry(run.storage, f.path) for f in sealed.files] if in_place else []
    entries = [e for e in there if e is not None and e.kind == "file"]
    in_place = in_place and [e.size for e in entries] == [f.size for f in sealed.files]
    changed = in_place and not looks_as_read(entries, sealed, verdict)
    if sure and changed:
        in_place, why = False, "the file in place has changed since"
    asked = (every_copy or not in_place) and history.may_be_kept(id)
    copy = read_kept(run, id) if asked else None
    if copy is not None and not kept_matches(run, copy, sealed):
        copy = None
    at = verdict.checked_at
    if in_place:
        path, reason = run.usable(sealed.path), f"verified {at}, in place"
    elif copy is not None:
        path, reason = run.usable_record(copy.checkpoint_key), f"verified; {why}, so this is the kept copy"
    else:
        return None
    place = IN_PLACE if in_place else KEPT
    answer = KnownGood(path=path, id=id, kept=not in_place, verified_at=at, reason=reason, place=place)
    return Presence(answer=answer, in_place=in_place, changed=changed, copy=copy)
