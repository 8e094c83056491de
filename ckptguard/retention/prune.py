"""Remove from a run what its policy does not keep, and empty the trash after its grace period.

Everything that decides about a removal is read strictly: an unreadable record ends the whole attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ckptguard.decisions.budget import Budget, WillThin, cut_to_budget
from ckptguard.decisions.retention import Present, RetentionDecision, decide, may_be_thinned
from ckptguard.errors import BusyError, CouldNotTellError, RecordsError
from ckptguard.layouts import Checkpoint
from ckptguard.records.run import Run
from ckptguard.records.trash import MARKED, Trashed, list_trashed, read_trash
from ckptguard.records.who_and_when import seconds_of, this_moment
from ckptguard.retention.space import measure_space
from ckptguard.retention.trash import delete_for_good, expire_aside, in_trash_for, settle_trash, throw_away
from ckptguard.runs.lock import run_lock
from ckptguard.runs.removal_holds import pins_of, references_to
from ckptguard.runs.run_reader import RunMemory, RunReader
from ckptguard.runs.run_view import RunView
from ckptguard.runs.saved_together import RememberedSaves, needed_by_saves, whole_saves
from ckptguard.runs.work import noted
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy, parse_span
from ckptguard.values.verdict import Outcome

_NOT_COLLECTED = "expired files that were moved aside could not be removed"


class ThinnedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What thinning took from a checkpoint, or would take: `files`, together about `bytes`. Those in `anew` are written
    anew, and about this number of their bytes goes. If it takes nothing, `reason` says why. `id` is that of the whole
    checkpoint."""

    path: str
    id: CheckpointId
    files: tuple[str, ...] = ()
    anew: dict[str, int] = {}
    bytes: int = 0
    reason: str = ""


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy decided, and what was done. `removed` went to the trash, `emptied` was deleted from the trash.

    `thinned` are the checkpoints whose state for a resume went to the trash, and those of which it could not. `budget`
    is there if the policy has `keep_bytes`. With `dry_run` nothing was done. `could_not_tell` are the problems met, as
    sentences.
    """

    dry_run: bool
    policy: Policy
    decisions: tuple[RetentionDecision, ...]
    removed: tuple[RetentionDecision, ...]
    in_trash: tuple[Trashed, ...]
    emptied: tuple[Trashed, ...]
    thinned: tuple[ThinnedCheckpoint, ...] = ()
    budget: Budget | None = None
    could_not_tell: tuple[str, ...] = ()


def prune(
    view: RunView,
    policy: Policy,
    *,
    grace: float,
    dry_run: bool = False,
    agree: Callable[[Pruned], None] | None = None,
    will_thin: WillThin | None = None,
) -> Pruned:
    """Move what the policy does not keep to the trash, and delete what was there for more than `grace` seconds.

    The decision is made under the run's lock from a new listing. With `dry_run` the view is used as it is. A problem
    with one checkpoint ends the work, and is part of the result. `agree` is called with the plan, as a dry run answers
    it, before anything is removed. It may raise. `will_thin` is what thinning would take: a budget asks for that
    first.

    Raises:
        CouldNotTellError: a listing failed, or a record of a checkpoint in place is unreadable. Nothing is removed.
        BusyError: another process holds the run.
    """
    if dry_run:
        return _planned(view, _look(view, policy.keep_good), policy, grace, will_thin)
    with run_lock(view.run):
        settle_trash(view.run)
        view.forget()
        seen = _look(view, policy.keep_good)
        decisions, budget = _decided(view, seen, policy, will_thin)
        if any(not d.keep for d in decisions) and view.run.storage.renew():
            view.forget()  # others may have pinned some since they were listed
            seen = _look(view, policy.keep_good)
            decisions, budget = _decided(view, seen, policy, will_thin)
        may_go: Collection[Trashed] | None = None
        if agree is not None:
            planned = _planned(view, seen, policy, grace, will_thin)
            agree(planned)
            decisions, budget, may_go = list(planned.decisions), planned.budget, planned.emptied
        removed, troubles = _remove(view.run, seen, decisions, policy)
        if removed or troubles:
            view.forget()
        emptied: list[Trashed] = []
        in_trash: list[Trashed] = []
        if not troubles:
            with noted(troubles, "the trash could not be emptied"):
                _empty(view, policy, grace, emptied, may_go)
        with noted(troubles, "the trash could not be listed"):
            in_trash = read_trash(view.run)
        with noted(troubles, _NOT_COLLECTED):
            expire_aside(view, grace)
    return Pruned(
        dry_run=False,
        policy=policy,
        decisions=tuple(decisions),
        removed=tuple(removed),
        in_trash=tuple(in_trash),
        emptied=tuple(emptied),
        budget=budget,
        could_not_tell=tuple(troubles),
    )


def _decided(
    view: RunView, seen: _Look, policy: Policy, will_thin: WillThin | None
) -> tuple[list[RetentionDecision], Budget | None]:
    """Decide by the rules, then by the budget if there is one."""
    decisions = decide(seen.present, policy, now=this_moment().wall, saves=seen.saves)
    if policy.keep_bytes is None:
        return decisions, None
    space = measure_space(view, {one.path for one in seen.present})
    return cut_to_budget(decisions, space, policy, saves=seen.saves, will_thin=will_thin)


def _planned(view: RunView, seen: _Look, policy: Policy, grace: float, will_thin: WillThin | None) -> Pruned:
    """Return what would be done. Nothing is changed."""
    decisions, budget = _decided(view, seen, policy, will_thin)
    emptied = _due(view, seen, policy, grace)
    return Pruned(
        dry_run=True,
        policy=policy,
        decisions=tuple(decisions),
        removed=tuple(d for d in decisions if not d.keep),
        in_trash=tuple(mark for mark in seen.trash if mark not in emptied),
        emptied=tuple(emptied),
        budget=budget,
    )


def to_thin(view: RunView, policy: Policy) -> list[tuple[Checkpoint, CheckpointId, str]]:
    """Look again which checkpoints may be thinned, oldest first: each with its id, and why it may not after all, or "".

    Raises CouldNotTellError as `prune` does.
    """
    seen = _look(view, policy.keep_good)
    decisions = decide(seen.present, policy, now=this_moment().wall, saves=seen.saves)
    together = {id for save in seen.saves for id in save}
    return [
        (seen.checkpoints[one.path], one.id, "it was saved together with others" if one.id in together else "")
        for one in reversed(may_be_thinned(decisions, policy))
    ]


def prune_by_settings(
    view: RunView, policy: Policy | None = None, *, will_thin: WillThin | None = None
) -> tuple[tuple[str, ...], Budget | None, list[str]]:
    """Prune by the settings, empty the trash, and remove expired files that were moved aside. `policy` is
    that of the settings, or one made of it. `will_thin` is as for `prune`.

    Returns the removed paths, how the run stands to its budget, and the problems as sentences. Without rules in the
    settings no checkpoint is removed.
    """
    policy, grace = policy or view.settings.retention(), parse_span(view.settings.trash_grace)
    try:
        if policy.asks_nothing and not list_trashed(view.run):
            troubles: list[str] = []
            with run_lock(view.run):
                view.refresh()
                with noted(troubles, _NOT_COLLECTED):
                    expire_aside(view, grace)
            return (), None, troubles
        done = prune(view, policy, grace=grace, will_thin=will_thin)
    except (BusyError, CouldNotTellError) as error:
        return (), None, [f"nothing was pruned: {error.message}"]
    return tuple(d.checkpoint.path for d in done.removed), done.budget, list(done.could_not_tell)


def empty_trash_early(view: RunView, has_enough: Callable[[], bool]) -> list[str]:
    """Delete from the trash what may go before its grace period is over, oldest first, until `has_enough`. Returns the
    paths.

    Raises:
        CouldNotTellError: a listing failed, or a record of a checkpoint is unreadable. Nothing more is deleted.
        BusyError: another process holds the run.
    """
    if not list_trashed(view.run):
        return []
    policy, paths = view.settings.retention(), list[str]()
    with run_lock(view.run):
        settle_trash(view.run)
        view.forget()
        due = _due(view, _look(view, policy.keep_good), policy, -1.0)
        for mark in sorted((mark for mark in due if mark.how != MARKED), key=lambda mark: mark.removed_at):
            if has_enough():
                break
            if mark.id not in pins_of(view.run):
                delete_for_good(view.run, mark)
                paths.append(mark.path)
    return paths


def _remove(
    run: Run, seen: _Look, decisions: Sequence[RetentionDecision], policy: Policy
) -> tuple[list[RetentionDecision], list[str]]:
    """Move to the trash what is not kept, has not changed and was not put to use meanwhile. A problem ends it."""
    removed: list[RetentionDecision] = []
    # The newest good ones of each series: others are removed only because these exist.
    floor = _newest_good([d.checkpoint for d in decisions if d.checkpoint.id.step is not None], policy.keep_good)
    for decision in decisions:
        chosen = decision.checkpoint
        try:
            if decision.keep or chosen.id in pins_of(run):
                continue
            if not _still_so(run, [seen.checkpoints[chosen.path]]):
                continue  # deleted or saved again meanwhile: the next pass decides about it
            if not _still_so(run, [seen.checkpoints[c.path] for c in floor.get(chosen.id.series, ())]):
                return removed, [f"{chosen.path} was not removed: newer good ones changed meanwhile"]
            if throw_away(run, seen.checkpoints[chosen.path], chosen.id):
                removed.append(decision)
        except CouldNotTellError as error:
            return removed, [f"{chosen.path} could not be removed: {error.message}"]
    return removed, []


def _still_so(run: Run, checkpoints: Sequence[Checkpoint]) -> bool:
    """True if the files are still as listed: the trainer holds no lock."""
    now = ((find_entry(run.storage, meant.key), meant) for c in checkpoints for meant in c.entries)
    return all(entry is not None and entry.signature == meant.signature for entry, meant in now)


def _empty(
    view: RunView,
    policy: Policy,
    grace: float,
    emptied: list[Trashed],
    only: Collection[Trashed] | None,
) -> None:
    """Delete what is due in the trash. This lists the run again, because what was just removed no longer counts."""
    if list_trashed(view.run):
        for mark in _due(view, _look(view, policy.keep_good), policy, grace):
            if mark.id in pins_of(view.run) or (only is not None and mark not in only):
                continue  # it was put to use meanwhile, or nobody agreed to it
            delete_for_good(view.run, mark)
            emptied.append(mark)


def _due(view: RunView, seen: _Look, policy: Policy, grace: float) -> list[Trashed]:
    """Return what may be deleted from the trash now. The rules of retention hold here, too.

    So pinned ones stay, and those older than a pending one. One that became one of the newest good ones again stays,
    too, because newer ones turned out bad.
    """
    if not seen.trash:
        return []
    pins = pins_of(view.run)
    laws = Policy(keep_last=policy.keep_good, keep_good=policy.keep_good, drop_failed=True)
    trashed, reader = [], RunReader(view.history, RunMemory())
    for mark in seen.trash:
        outcome = _strict_outcome(reader, mark.id)
        doubted = outcome is Outcome.GOOD and mark.becomes > 0 and not view.history.is_good(mark.id)
        trashed.append(
            Present(
                path=mark.folder,
                id=mark.id,
                outcome=Outcome.SUSPECT if doubted else outcome,  # as what thinning left of it
                thinned=_is_thinned(reader, mark.id),
                holds=tuple(pins.get(mark.id, ())),
            )
        )
    goes = {d.checkpoint.path for d in decide([*seen.present, *trashed], laws) if not d.keep}
    return [m for m in seen.trash if m.folder in goes and in_trash_for(view.run, m) > grace]


@dataclass(frozen=True)
class _Look:
    """The checkpoints in place, as values to decide by, and by their paths."""

    present: list[Present]
    checkpoints: dict[str, Checkpoint]
    trash: list[Trashed]
    saves: list[frozenset[CheckpointId]]  # of several checkpoints


def _look(view: RunView, keep_good: int) -> _Look:
    """Look at the checkpoints in place. What justifies a removal is read again: disks decay.

    A checkpoint in the trash is not in place, wherever its files are. Raises CouldNotTellError if a listing fails, or a
    record of a checkpoint in place cannot be read.
    """
    pins, references = pins_of(view.run), references_to(view)
    trash = read_trash(view.run)
    marked = {(mark.id, mark.path): mark.signature for mark in trash if mark.how == MARKED}
    found = {checkpoint.path: _present(checkpoint, view.reader) for checkpoint in view.checkpoints}
    anew = RunReader(view.history, RunMemory())
    for good in _newest_good(found.values(), keep_good).values():
        found |= {one.path: _present(view.listing.checkpoints[one.path], anew) for one in good}
    source = RememberedSaves(view.reader)
    needed, saves = needed_by_saves(source, keep_good), whole_saves(source)
    present = []
    for checkpoint in view.checkpoints:
        one = found[checkpoint.path]
        signature = tuple((e.key, *e.signature) for e in checkpoint.entries)
        if marked.get((one.id, checkpoint.path)) == signature:
            continue
        of_save = (f"part of one of the newest {keep_good} good saves",) if one.id in needed else ()
        holds = (*pins.get(one.id, ()), *references.get(checkpoint.path, ()), *of_save)
        present.append(msgspec.structs.replace(one, holds=holds))
    return _Look(present, {checkpoint.path: checkpoint for checkpoint in view.checkpoints}, trash, saves)


def _strict_outcome(reader: RunReader, id: CheckpointId) -> Outcome:
    """Return the newest outcome of a generation. Raises RecordsError if it is unreadable: an older one may differ."""
    current_verdict, judged = reader.history.current_verdict(id), reader.judged(id)
    if current_verdict is None:
        return Outcome.PENDING
    if judged is None or (judged.number, judged.outcome) != (current_verdict.number, current_verdict.outcome):
        raise RecordsError(
            f"the verdict {current_verdict.number} on {id} of {id.series} cannot be read",
            hint="run ckptguard verify on that checkpoint: a newer verdict replaces it",
        )
    return judged.outcome


def _newest_good(found: Iterable[Present], keep_good: int) -> dict[str, list[Present]]:
    """Return the newest good ones of each series that were not thinned, newest first."""
    by_series: dict[str, list[Present]] = {}
    for one in sorted(found, key=lambda one: one.id.order, reverse=True):
        if one.outcome is Outcome.GOOD and not one.thinned:
            by_series.setdefault(one.id.series, []).append(one)
    return {series: good[:keep_good] for series, good in by_series.items()}


def _present(checkpoint: Checkpoint, reader: RunReader) -> Present:
    """Return a checkpoint in place without its holds. An unsealed one may have the verdict INCOMPLETE."""
    history, series, step = reader.history, checkpoint.series, checkpoint.step
    current = history.current(series, step, checkpoint.path, path_of=reader.sealed_path)
    id = current or history.next_id(series, step)
    sealed, outcome = reader.sealed(id) if current is not None else None, _strict_outcome(reader, id)
    of_others = outcome is Outcome.GOOD and reader.has_changed(id, checkpoint.entries)
    # A verdict on what lay there before, or on what nobody can look at.
    is_of_other_files = current is not None and (sealed is None or of_others or checkpoint.unread is not None)
    return Present(
        path=checkpoint.path,
        id=id,
        outcome=Outcome.PENDING if is_of_other_files or checkpoint.unread is not None else outcome,
        changed=is_of_other_files and sealed is not None,
        saved=seconds_of(sealed.series_head.sealed_at) if sealed is not None else None,
        metrics=sealed.metrics if sealed is not None else {},
        bytes=checkpoint.bytes,
        thinned=sealed is not None and bool(sealed.thinned),
    )


def _is_thinned(reader: RunReader, id: CheckpointId) -> bool:
    sealed = reader.sealed(id)
    return sealed is not None and bool(sealed.thinned)
