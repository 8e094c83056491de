"""Prune: remove from a run what its policy does not keep, and empty the trash when its time of grace is over."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckptguard.decisions.retention import Present, RetentionDecision, decide
from ckptguard.errors import BusyError, CouldNotTellError, ObjectMissingError
from ckptguard.layouts import Checkpoint
from ckptguard.records.run import Run
from ckptguard.records.trash import Trashed, list_trashed, read_trash
from ckptguard.records.who_and_when import this_moment
from ckptguard.retention.expire_trash import expire_aside
from ckptguard.retention.inventory import Look, Remembered, look, strict_verdict
from ckptguard.retention.trash import delete_for_good, in_trash_for, settle_trash, throw_away
from ckptguard.runs.lock import run_lock
from ckptguard.runs.removal_holds import pins_of
from ckptguard.runs.run_view import RunView
from ckptguard.values.retention_policy import Policy, parse_span
from ckptguard.values.verdict import Outcome


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy decided, and what was done about it: `removed` went to the trash, `emptied` went from there for
    good. With `dry_run` nothing was done. `could_not_tell` are sentences about what went wrong on the way."""

    dry_run: bool
    policy: Policy
    decisions: tuple[RetentionDecision, ...]
    removed: tuple[RetentionDecision, ...]
    in_trash: tuple[Trashed, ...]
    emptied: tuple[Trashed, ...]
    could_not_tell: tuple[str, ...] = ()


def prune(
    view: RunView, policy: Policy, *, grace: float, dry_run: bool = False, remembered: Remembered | None = None
) -> Pruned:
    """Put what the policy does not keep into the trash, and remove for good what lies there for longer than `grace`
    seconds.

    The decision is taken under the run's lock, right before, by a new look at the run; what is `remembered` of records
    is not read again. With `dry_run` the view is looked at as it is.

    Raises:
        CouldNotTellError: a listing failed, or a record of what is in place cannot be read. Nothing is removed.
        BusyError: another process holds the run.
    Trouble with one checkpoint ends the work and is told in the answer.
    """
    remembered = remembered if remembered is not None else Remembered()
    if dry_run:
        seen = look(view, remembered, keep_good=policy.keep_good)
        decisions = decide(seen.present, policy, now=this_moment().wall)
        removed, emptied = [d for d in decisions if not d.keep], _due(view, seen, policy, grace)
        troubles: list[str] = []
        in_trash = [mark for mark in seen.trash if mark not in emptied]
    else:
        with run_lock(view.run):
            settle_trash(view.run)
            view.forget()
            seen = look(view, remembered, keep_good=policy.keep_good)
            decisions = decide(seen.present, policy, now=this_moment().wall)
            removed, troubles = _remove(view.run, seen, decisions, policy)
            if removed or troubles:
                view.forget()
            emptied = [] if troubles else _empty(view, policy, grace, remembered, troubles)
            in_trash = _left_in_trash(view.run, troubles)
            _expire_aside(view, grace, troubles)
    return Pruned(
        dry_run=dry_run,
        policy=policy,
        decisions=tuple(decisions),
        removed=tuple(removed),
        in_trash=tuple(in_trash),
        emptied=tuple(emptied),
        could_not_tell=tuple(troubles),
    )


def prune_by_settings(view: RunView, remembered: Remembered | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Prune as the settings ask, empty the trash, and remove what was put aside: the paths that were removed, and
    sentences about what went wrong. Without rules in the settings no checkpoint is removed."""
    policy, grace = view.settings.retention(), parse_span(view.settings.trash_grace)
    try:
        if policy.asks_nothing and not list_trashed(view.run):
            troubles: list[str] = []
            with run_lock(view.run):
                view.refresh()
                _expire_aside(view, grace, troubles)
            return (), tuple(troubles)
        done = prune(view, policy, grace=grace, remembered=remembered)
    except (BusyError, CouldNotTellError) as error:
        return (), (f"nothing was pruned: {error.message}",)
    return tuple(d.checkpoint.path for d in done.removed), done.could_not_tell


def _remove(
    run: Run, seen: Look, decisions: Sequence[RetentionDecision], policy: Policy
) -> tuple[list[RetentionDecision], list[str]]:
    """Put into the trash what is not kept, is still what it was, and came not into use meanwhile; trouble ends it."""
    removed: list[RetentionDecision] = []
    floor = _floor(decisions, policy)
    for decision in decisions:
        chosen = decision.checkpoint
        try:
            if decision.keep or chosen.id in pins_of(run):
                continue
            if not _still_so(run, [seen.checkpoints[chosen.path]]):
                continue  # rotated away or saved anew meanwhile: it is decided about at the next look
            if not _still_so(run, [seen.checkpoints[c.path] for c in floor[chosen.id.series]]):
                return removed, [f"{chosen.path} was not removed: newer good ones changed meanwhile"]
            if throw_away(run, seen.checkpoints[chosen.path], chosen.id):
                removed.append(decision)
        except CouldNotTellError as error:
            return removed, [f"{chosen.path} could not be removed: {error.message}"]
    return removed, []


def _floor(decisions: Sequence[RetentionDecision], policy: Policy) -> dict[str, list[Present]]:
    """The newest good ones of each series, because of which others may go."""
    good: dict[str, list[Present]] = {}
    for checkpoint in (decision.checkpoint for decision in decisions):
        if checkpoint.outcome is Outcome.GOOD and checkpoint.id.step is not None:
            good.setdefault(checkpoint.id.series, []).append(checkpoint)
    return {series: found[-policy.keep_good :] for series, found in good.items()}


def _still_so(run: Run, checkpoints: Sequence[Checkpoint]) -> bool:
    """Whether files still are what the listing showed: the trainer holds no lock."""
    try:
        return all(run.storage.stat(e.key).signature == e.signature for c in checkpoints for e in c.entries)
    except ObjectMissingError:
        return False


def _empty(view: RunView, policy: Policy, grace: float, remembered: Remembered, troubles: list[str]) -> list[Trashed]:
    """Remove for good what is due, by a look of its own: what was removed just now counts no more."""
    emptied: list[Trashed] = []
    try:
        if list_trashed(view.run):
            for mark in _due(view, look(view, remembered, keep_good=policy.keep_good), policy, grace):
                if mark.id in pins_of(view.run):
                    continue  # it came into use meanwhile
                delete_for_good(view.run, mark)
                emptied.append(mark)
    except CouldNotTellError as error:
        troubles.append(f"the trash could not be emptied: {error.message}")
    return emptied


def _expire_aside(view: RunView, grace: float, troubles: list[str]) -> None:
    try:
        expire_aside(view, grace)
    except CouldNotTellError as error:
        troubles.append(f"what was put aside could not be collected: {error.message}")


def _left_in_trash(run: Run, troubles: list[str]) -> list[Trashed]:
    try:
        return read_trash(run)
    except CouldNotTellError as error:
        troubles.append(f"the trash could not be listed: {error.message}")
        return []


def _due(view: RunView, seen: Look, policy: Policy, grace: float) -> list[Trashed]:
    """What may go from the trash for good now. The laws of retention hold here too: what would be one of the newest
    good ones again, because newer ones turned out bad, stays, as does what is pinned or older than a pending one."""
    pins = pins_of(view.run)
    laws = Policy(keep_last=policy.keep_good, keep_good=policy.keep_good, drop_failed=True)
    trashed = []
    for mark in seen.trash:
        verdict = strict_verdict(view, mark.id)
        trashed.append(
            Present(
                path=mark.folder,
                id=mark.id,
                outcome=verdict.outcome if verdict is not None else Outcome.PENDING,
                holds=tuple(pins.get(mark.id, ())),
            )
        )
    goes = {d.checkpoint.path for d in decide([*seen.present, *trashed], laws) if not d.keep}
    return [m for m in seen.trash if m.folder in goes and in_trash_for(view.run, m) > grace]
