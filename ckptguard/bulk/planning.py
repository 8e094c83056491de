"""Find out what there is to do in one run. No checkpoint is read.

What is done is on record, so the plan of a job that was interrupted has only the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from ckptguard.bulk.messages import Item, Task, item_of, portable, trouble_of
from ckptguard.bulk.tasks import replica_item
from ckptguard.decisions.bulk_order import parts_of
from ckptguard.fleet.find_runs import FleetRun
from ckptguard.layouts import Checkpoint
from ckptguard.records.kept import KeptCopy, list_kept, list_set_aside, read_kept
from ckptguard.records.scrubs import IN_PLACE
from ckptguard.repair.scrub import Due, ScrubOrder, due_places
from ckptguard.replicas.replicate import replica_urls, replicate
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.run_view import RunView, open_view
from ckptguard.values.ids import numbers_of
from ckptguard.values.verdict import Outcome

_SHARE = 32  # files with less than this part of `large` bytes are scanned together
# Something to do, what is on record of a checkpoint, or what could not be found out.
Found = Task | Item | str


class PlanRequest(NamedTuple):
    """What a verb is planned for. `task` is what all tasks of the run share. A scrub skips what was read within
    `max_age` seconds. A checkpoint of `large` bytes or more is scanned in parts."""

    task: Task
    max_age: float
    large: int

    def to_do(self, chain: str = "", **about: Any) -> Task:
        """Return a task that the plan has found."""
        return msgspec.structs.replace(self.task, chain=f"{self.task.url} {chain}", **about)


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a verb has to do in one run, in its order. `outcomes` count what is on record of the rest, and `wrong` has
    what of it is not good. `trouble` says what could not be found out."""

    tasks: tuple[Task, ...] = ()
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    wrong: tuple[Item, ...] = ()
    trouble: str = ""


def plan_run(verb: str, run: FleetRun, *, max_age: float, large: int) -> RunPlan:
    """Find out what a verb has to do in a run, and what is on record of the rest."""
    try:
        view = open_view(run.url, run.settings)
        task = Task(verb=verb, url=run.url, settings=portable(run.settings), storage=run.settings.storage.names)
        request = PlanRequest(msgspec.structs.replace(task, protection=_protection(view)), max_age, large)
        found = [*_PLANS[verb](request, view), *view.listing.unread_notes]
    except Exception as error:  # the other runs are planned
        return RunPlan(trouble=trouble_of(error))
    known = [one for one in found if isinstance(one, Item)]
    return RunPlan(
        tasks=tuple(one for one in found if isinstance(one, Task)),
        outcomes=Counter(one.outcome.value for one in known),
        wrong=tuple(one for one in known if one.outcome is not Outcome.GOOD),
        trouble="; ".join(one for one in found if isinstance(one, str)),
    )


def _to_verify(request: PlanRequest, view: RunView) -> Iterator[Found]:
    """What has no verdict on its present files, in the order of training: checks compare a save with earlier ones."""
    for one in sorted(view.checkpoints, key=lambda c: (c.step is None, numbers_of(c.step), c.written_at, c.path)):
        parts = _parts_of(one, request.large)
        due = request.to_do(one.series, path=one.path, layout=one.layout, parts=parts, **_size_of([one]))
        yield _known(request, view, one) or due


def _to_scrub(request: PlanRequest, view: RunView) -> Iterator[Found]:
    """What nobody has read for `max_age` seconds."""
    in_place = set()
    for due in due_places(view, ScrubOrder(max_age=request.max_age)):
        in_place |= {due.path} if due.place == IN_PLACE else set()
        chain, last = f"{due.id.series}/{due.id}/{due.place}", due.last or 0.0
        size = _size_of([due.checkpoint] if due.checkpoint is not None else _kept_of(view, due))
        yield request.to_do(chain, path=due.path, id=due.id, place=due.place, last=last, **size)
    yield from filter(None, (_known(request, view, one) for one in view.checkpoints if one.path not in in_place))


def _to_replicate(request: PlanRequest, view: RunView) -> Iterator[Found]:
    """What a replica does not have yet, the newest first. One replica of a run gets one checkpoint at a time."""
    for place in replica_urls(view.run.url, view.settings):
        replica = replicate(view, place, dry_run=True)
        if replica.trouble is not None:
            yield f"{place}: {replica.trouble}"
        for one in replica.checkpoints:
            in_place = view.checkpoint(one.path)
            size = {"bytes": one.bytes, "file_count": 1 if in_place is None else len(in_place.entries)}
            due = request.to_do(place, path=one.path, id=one.id, place=place, **size)
            if one.done != "gone":
                yield due if one.done == "would send" else replica_item(due, one)
    if not view.settings.replicas:
        yield "its settings name no replica"


def _to_repair(request: PlanRequest, view: RunView) -> Iterator[Found]:
    """The whole run, if it has known damage: a repair holds the run's lock."""
    known = [(one, item) for one in view.checkpoints if (item := _known(request, view, one)) is not None]
    bad = [one for one, item in known if item.outcome is Outcome.BAD]
    if bad or list_set_aside(view.run):
        yield request.to_do(**_size_of(bad))
    yield from (item for _, item in known if item.outcome is not Outcome.BAD)


_PLANS: dict[str, Callable[[PlanRequest, RunView], Iterator[Found]]] = {
    "verify": _to_verify,
    "scrub": _to_scrub,
    "replicate": _to_replicate,
    "repair": _to_repair,
}


def _parts_of(checkpoint: Checkpoint, large: int) -> tuple[tuple[str, ...], ...]:
    """Return the parts in which a large checkpoint is scanned; none for another one."""
    if checkpoint.bytes < large:
        return ()
    parts = parts_of(((entry.key, entry.size) for entry in checkpoint.entries), large // _SHARE)
    return tuple(parts) if len(parts) > 1 else ()


def _known(request: PlanRequest, view: RunView, checkpoint: Checkpoint) -> Item | None:
    """Return what is on record of the files in place; None if that is nothing, or they may be others."""
    history = view.history
    id = view.current_if_readable(checkpoint) if checkpoint.unread is None else None
    verdict = history.verdict(id) if id is not None else None
    sealed = history.manifest(id) if id is not None else None
    if verdict is None or sealed is None or not looks_as_read(checkpoint.entries, sealed, verdict):
        return None  # also what was unfinished when it was read: it may be complete now
    about = {"path": checkpoint.path, "id": id, "bytes": checkpoint.bytes}
    return item_of(request.task, verdict.outcome, findings=verdict.findings, **about)


def _protection(view: RunView) -> int:
    """Return how well a run is protected, by the names of its records: 0 without anything good, 1 without a copy."""
    history = view.history
    current_verdicts = (one for series in history.names for one in history.current_verdicts(series).values())
    if not any(one.outcome is Outcome.GOOD for one in current_verdicts):
        return 0
    return 2 if view.settings.replicas or list_kept(view.run) else 1


def _kept_of(view: RunView, due: Due) -> list[KeptCopy]:
    copy = read_kept(view.run, due.id)
    return [] if copy is None else [copy]


def _size_of(found: Iterable[Checkpoint | KeptCopy]) -> dict[str, Any]:
    """Return how large these are, as fields of a task."""
    sizes = [entry.size for one in found for entry in one.entries]
    return {"bytes": sum(sizes), "file_count": len(sizes)}
