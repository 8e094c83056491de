"""What an operator may have done to a run: the arguments of each verb, its plan, and what came of it.

Each verb is one operation of the engine. Its plan has the words of the command line's dry run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

from ckptguard.decisions.retention import unknown_metrics
from ckptguard.documents.build import fields
from ckptguard.documents.done_lines import (
    prune_lines,
    prune_table,
    repair_lines,
    replica_line,
    replica_table,
    rollback_lines,
    silence_text,
)
from ckptguard.documents.report_lines import Line, Table, checked_lines, report_lines
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import NotFoundError, SettingsError
from ckptguard.layouts import Checkpoint
from ckptguard.records.silences import end_silence, read_silence, silence_end, silence_run
from ckptguard.records.who_and_when import lasts_until
from ckptguard.recover.roll_back import GoBack, RolledBack, known_good_of, roll_back
from ckptguard.repair.repair import Repaired, repair
from ckptguard.replicas.replicate import Replica, replica_urls, replicate
from ckptguard.reporting.incidents_of_saves import IncidentsOfSaves
from ckptguard.reporting.open_and_close import close_after_rollback, close_incidents_about
from ckptguard.retention.pin import pin, pinned_id, pins_on, release
from ckptguard.retention.prune import Pruned, ThinnedCheckpoint
from ckptguard.runs.run_view import RunView, select_checkpoint
from ckptguard.runs.target import Target, one_checkpoint
from ckptguard.runs.work import Work
from ckptguard.storage.redaction import redacted
from ckptguard.terminal.columns import lay_out
from ckptguard.upkeep.budget import prune_and_thin
from ckptguard.values.ids import CheckpointId, escape, id_from_record
from ckptguard.values.retention_policy import parse_span
from ckptguard.values.settings import Settings, with_table
from ckptguard.values.silence import as_of
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import Selection, verify_target
from ckptguard.verification.user_decisions import accept, clear_current_verdict, suspect_named
from ckptguard_daemon.log import log

Word = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class ActionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What would be done, as lines. `costs`: the bytes that are read, sent, moved or deleted, if that is known.

    `about`: plain values that change whenever what the plan is about does.
    """

    lines: tuple[str, ...]
    costs: Mapping[str, int] = {}
    about: Any = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, as lines. `well`: all of what was planned."""

    lines: tuple[str, ...]
    well: bool = True


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of one run. The view is fresh. `arguments` are the verb's own kind of `ActionRequest`. `check`
    raises PlanChangedError for another plan than the one that was agreed to; it is None in a dry run. `name` is that of
    the one who asks."""

    guarded: WatchedRun
    view: RunView
    arguments: Any
    work: Work
    name: str
    check: Callable[[ActionPlan], None] | None = None

    def agreed(self, plan: ActionPlan) -> bool:
        """True if this plan is to be carried out, False in a dry run. Raises PlanChangedError."""
        if self.check is not None:
            self.check(plan)
        return self.check is not None

    @property
    def reason(self) -> str:
        """Why, as records may have it."""
        return escape(redacted(self.arguments.reason))

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return self.view.settings


class ActionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every request for an action says. A real one has a reason, and the token of the plan. Of itself it is about
    the whole run."""

    dry_run: bool = True
    reason: str = ""
    token: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """What else it says."""
        said = msgspec.structs.asdict(self)
        return {name: value for name, value in said.items() if name not in _OF_ALL and value is not None}


_OF_ALL = ActionRequest.__struct_fields__


class OfCheckpoint(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint: its path, its id, its step, or its name in the catalogue."""

    checkpoint: Word


class OfAny(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint, or the whole run."""

    checkpoint: Word | None = None


class Pinning(OfCheckpoint, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint, and until when: a date, a time or a span such as 30d."""

    until: Word | None = None


class Silencing(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Until when: a date, a time or a span such as 8h."""

    until: Word


class Rules(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules of retention that are used instead of those in the settings. A form says numbers as text."""

    keep_last: int | Word | None = None
    keep_every: int | Word | None = None
    keep_within: float | Word | None = None
    keep_best: tuple[Word, ...] | Word | None = None
    thin_after: int | Word | None = None
    keep_bytes: int | Word | None = None
    failed: bool | Word | None = None

    def settings(self, settings: Settings) -> Settings:
        """Return the settings with these rules. Raises SettingsError."""
        given = self.arguments
        if isinstance(self.keep_best, str):
            given["keep_best"] = (self.keep_best,)
        if "failed" in given:
            given["prune_failed"] = given.pop("failed")
        return with_table(settings, given, "the request")


class Going(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far to go back: to a path, an id or a step. `force`: even while files of the run are being written."""

    to: Word | None = None
    step: int | None = None
    force: bool = False


class Verb(NamedTuple):
    """One verb: its arguments, and what plans it or does it. Before its first change it has its plan checked."""

    arguments: type[ActionRequest]
    act: Callable[[Asked], ActionPlan | Done]


SOURCE = "dashboard"


# verify


def _verify(asked: Asked) -> ActionPlan | Done:
    chosen = _target(asked)
    found = [chosen.checkpoint] if chosen.checkpoint is not None else list(asked.view.checkpoints)
    if not found:
        raise NotFoundError(f"there is no checkpoint in {asked.view.run.url}")
    planned = [f"would read every byte of {escape(c.path)}, and record the verdict" for c in found]
    costs = {"bytes_read": sum(checkpoint.bytes for checkpoint in found)}
    plan = ActionPlan(lines=tuple(planned), costs=costs, about=[_files(c) for c in found])
    if not asked.agreed(plan):
        return plan
    what = Selection(wait=asked.settings.settle + 1)
    with IncidentsOfSaves(asked.settings, source=SOURCE, log=log, tell=asked.guarded.hooks.tell) as incidents:
        report = verify_target(chosen, asked.settings, what, judged=incidents.judged, work=asked.work)
    lines = [*_texts(report_lines(report)), *(escape(note) for note in report.notes)]
    return Done(lines=tuple(lines), well=not report.could_not_tell)


def _target(asked: Asked) -> Target:
    view = asked.view
    if asked.arguments.checkpoint is None:
        return Target(url=view.run.url, kind="run", storage=view.run.storage, view=view)
    checkpoint = _checkpoint(asked)
    return one_checkpoint(view.run.usable(checkpoint.path), view.run.storage, checkpoint, view)


# pin, unpin


def _pin(asked: Asked) -> ActionPlan | Done:
    checkpoint, until = _checkpoint(asked), asked.arguments.until
    lasts = None if until is None else lasts_until(until)
    line = f"would pin {escape(checkpoint.path)}" + (f" until {escape(until)}" if until is not None else "")
    plan = ActionPlan(lines=(line,), about=[str(pinned_id(asked.view, checkpoint)), _files(checkpoint)])
    if not asked.agreed(plan):
        return plan
    pinned = pin(asked.view, checkpoint, note=asked.reason, lasts=lasts)[0]
    return Done(lines=(f"pinned {escape(checkpoint.path)}" + (f" until {pinned.until}" if pinned.until else ""),))


def _unpin(asked: Asked) -> ActionPlan | Done:
    checkpoint = _checkpoint(asked)
    found = pins_on(asked.view, checkpoint)
    lines = [f"would remove a pin of {escape(checkpoint.path)}: {escape(one.note) or one.since}" for one in found]
    plan = ActionPlan(lines=tuple(lines), about=sorted(one.key for one in found))
    if not asked.agreed(plan):
        return plan
    release(asked.view, found)
    return Done(lines=(f"unpinned {escape(checkpoint.path)}",))


# silence, unsilence


def _silence(asked: Asked) -> ActionPlan | Done:
    run, until = asked.view.run, asked.arguments.until
    ends, before = silence_end(until), as_of(read_silence(run), time.time())
    lines = [f"would silence {escape(run.url)} until {escape(until)}: no messages and no alerts"]
    lines += [f"would replace a silence {silence_text(before)}"] if before is not None else []
    plan = ActionPlan(lines=tuple(lines))
    if not asked.agreed(plan):
        return plan
    made = silence_run(run, ends, reason=asked.reason, by=asked.name)
    return Done(lines=(f"silenced {escape(run.url)} {silence_text(made)}",))


def _unsilence(asked: Asked) -> ActionPlan | Done:
    run = asked.view.run
    before = as_of(read_silence(run), time.time())
    if before is None:
        raise NotFoundError(f"{run.url} is not silenced")
    plan = ActionPlan(lines=(f"would end the silence {silence_text(before)}",))
    if not asked.agreed(plan):
        return plan
    end_silence(run)
    return Done(lines=(f"{escape(run.url)} is not silenced any more",))


# clear, accept


def _clear(asked: Asked) -> ActionPlan | Done:
    word = asked.arguments.checkpoint
    current_verdict = suspect_named(asked.view, word)
    line = f"would say that {escape(word)} is good, for the reason that you give"
    plan = ActionPlan(lines=(line,), about=[str(current_verdict.id), current_verdict.id.series, current_verdict.number])
    if not asked.agreed(plan):
        return plan
    verdict = clear_current_verdict(asked.view, current_verdict, word, reason=asked.reason)
    close_incidents_about(asked.view.run, id=verdict.id, action=f"cleared: {asked.reason}")
    return Done(lines=(f"{escape(word)} is {verdict.outcome.value}",))


def _accept(asked: Asked) -> ActionPlan | Done:
    checkpoint = _checkpoint(asked)
    path = checkpoint.path
    plan = ActionPlan(
        lines=(
            f"would take the tensors of {escape(path)} as the reference from now on",
            f"would verify {escape(path)} again",
        ),
        costs={"bytes_read": 2 * checkpoint.bytes},
        about=_files(checkpoint),
    )
    if not asked.agreed(plan):
        return plan
    checked = accept(asked.view, path, work=asked.work)
    if checked.outcome is Outcome.GOOD:
        close_incidents_about(asked.view.run, [path], action="its tensors were accepted")
    return Done(lines=_texts(checked_lines(checked)))


# prune


def prune_words(done: Pruned) -> tuple[str, ...]:
    """Return what a dry run of retention found, without its checkpoints."""
    unknown = unknown_metrics([d.checkpoint for d in done.decisions], done.policy)
    return (
        *(["no rule was given: nothing is removed"] if done.policy.asks_nothing else []),
        *_texts(prune_lines(done)),
        *(f'warning: no good checkpoint has the metric "{escape(name)}": it keeps none' for name in unknown),
    )


def prune_costs(done: Pruned) -> dict[str, int]:
    """Return the bytes that a dry run of retention found."""
    return {
        "bytes_moved": sum(d.checkpoint.bytes for d in done.removed) + sum(one.bytes for one in _thinned(done)),
        "bytes_deleted": sum(mark.bytes for mark in done.emptied),
    }


def prune_plan(done: Pruned) -> ActionPlan:
    """Return the plan that a dry run of retention found."""
    return ActionPlan(
        lines=(*_rows(prune_table(done)), *prune_words(done)),
        costs=prune_costs(done),
        about=[
            [[d.checkpoint.path, str(d.checkpoint.id), d.checkpoint.bytes] for d in done.removed],
            [[mark.folder, mark.bytes] for mark in done.emptied],
            [[one.path, str(one.id), *one.files] for one in _thinned(done)],
        ],
    )


def _thinned(done: Pruned) -> list[ThinnedCheckpoint]:
    return [one for one in done.thinned if not one.reason]


def dry_prune(view: RunView, rules: Rules) -> Pruned:
    """Return what these rules would remove. Nothing is changed."""
    settings = rules.settings(view.settings)
    return prune_and_thin(view, settings.retention(), grace=parse_span(settings.trash_grace), dry_run=True)


def _prune(asked: Asked) -> ActionPlan | Done:
    check, rules = asked.check, asked.arguments
    if check is None:
        return prune_plan(dry_prune(asked.view, rules))
    settings = rules.settings(asked.settings)
    done = prune_and_thin(
        asked.view,
        settings.retention(),
        grace=parse_span(settings.trash_grace),
        work=asked.work,
        agree=lambda planned: check(prune_plan(planned)),
    )
    return Done(
        lines=(*_texts(prune_lines(done)), *(f"error: {escape(sentence)}" for sentence in done.could_not_tell)),
        well=not done.could_not_tell,
    )


# replicate


def _replicate(asked: Asked) -> ActionPlan | Done:
    places = replica_urls(asked.view.run.url, asked.settings)
    if not places:
        raise SettingsError("there is no place to replicate to: set `replicas` in the settings")
    found = [(place, replicate(asked.view, place, dry_run=True)) for place in places]
    sent = {place: [c for c in replica.checkpoints if c.done == "would send"] for place, replica in found}
    plan = ActionPlan(
        lines=tuple(line for _, replica in found for line in _replica_lines(replica)),
        costs={"bytes_sent": sum(c.bytes for one in sent.values() for c in one)},
        about=[[place, [[str(c.id), c.path] for c in one]] for place, one in sent.items()],
    )
    if not asked.agreed(plan):
        return plan
    done = [replicate(asked.view, place, work=asked.work, only=[c.id for c in one]) for place, one in sent.items()]
    wrong = {"failed", "damaged"}
    return Done(
        lines=tuple(line for replica in done for line in _replica_lines(replica)),
        well=not any(r.trouble is not None or wrong & {c.done for c in r.checkpoints} for r in done),
    )


def _replica_lines(replica: Replica) -> list[str]:
    trouble = [] if replica.trouble is None else [f"error: {escape(replica.url)}: {escape(replica.trouble)}"]
    return [replica_line(replica).text, *_rows(replica_table(replica)), *trouble]


# repair


def _repair(asked: Asked) -> ActionPlan | Done:
    check, word = asked.check, asked.arguments.checkpoint
    path = None if word is None else _path_and_id(asked.view, word)[0]
    if check is None:
        return _repair_plan(repair(asked.view, path, dry_run=True, work=asked.work))
    done = repair(asked.view, path, work=asked.work, agree=lambda planned: check(_repair_plan(planned)))
    left = any(not file.repaired for file in done.files)
    return Done(lines=_repaired(done), well=not (left or done.still_bad or done.could_not_tell))


def _repair_plan(done: Repaired) -> ActionPlan:
    return ActionPlan(
        lines=_repaired(done),
        about=[
            [fields(file) for file in done.files],
            [[c.path, c.outcome.value] for c in done.checked],
            list(done.could_not_tell),
        ],
    )


def _repaired(done: Repaired) -> tuple[str, ...]:
    return (*_texts(repair_lines(done)), *(f"error: {escape(sentence)}" for sentence in done.could_not_tell))


# rollback


def _rollback(asked: Asked) -> ActionPlan | Done:
    check, to, step = asked.check, asked.arguments.to, asked.arguments.step
    if to is not None and step is not None:
        raise SettingsError("give `to` or `step`, not both")
    agree = None if check is None else (lambda planned: check(_rollback_plan(asked, planned)))
    back = GoBack(
        reason=asked.reason or "rolled back from the dashboard",
        to_id=None if to is None and step is None else known_good_of(asked.view, to, step),
        force=asked.arguments.force,
        dry_run=check is None,
        agree=agree,
    )
    done = roll_back(asked.view, back, work=asked.work)
    if check is None:
        return _rollback_plan(asked, done)
    close_after_rollback(asked.view.run, done)
    return Done(lines=_rolled_back(done))


def _rollback_plan(asked: Asked, done: RolledBack) -> ActionPlan:
    view = asked.view
    moved = [found for path in done.quarantined if (found := view.checkpoint(path)) is not None]
    manifest = view.history.manifest(done.source)
    return ActionPlan(
        lines=_rolled_back(done),
        costs={"bytes_read": 0 if manifest is None else manifest.bytes, "bytes_moved": sum(c.bytes for c in moved)},
        about=[fields(done), str(done.source), done.source.series, [_files(c) for c in moved]],
    )


def _rolled_back(done: RolledBack) -> tuple[str, ...]:
    left = (
        f"warning: {escape(path)} is bad and stays, for it is of another training: go back there with --to"
        for path in done.left_bad
    )
    return (*_texts(rollback_lines(done)), *left)


# what they share


def _checkpoint(asked: Asked) -> Checkpoint:
    """Return the checkpoint in place that is named. Raises NotFoundError, also if another save took its place."""
    view, word = asked.view, asked.arguments.checkpoint
    path, id = _path_and_id(view, word)
    checkpoint = select_checkpoint(view.run, view.checkpoints, path)
    if id is not None and view.current(checkpoint) != id:
        raise NotFoundError(f"{path} is another save now than {id}", hint="look at the run again")
    return checkpoint


def _path_and_id(view: RunView, word: str) -> tuple[str, CheckpointId | None]:
    """Return the path and the id that a name of the catalogue stands for. Any other word is returned as it is."""
    folder, slash, name = word.rpartition("/")
    id = id_from_record(folder, name) if slash and view.checkpoint(word) is None else None
    if id is None:
        return word, None
    manifest = view.history.manifest(id)
    if manifest is None:
        raise NotFoundError(f"nothing is known of a checkpoint {id} of {id.series}")
    return manifest.path, id


def _files(checkpoint: Checkpoint) -> list[Any]:
    """Return what is another value whenever a file of it changes."""
    return [checkpoint.path, repr(checkpoint.signature)]


def _texts(lines: Iterable[Line]) -> tuple[str, ...]:
    return tuple(line.text for line in lines)


def _rows(table: Table) -> list[str]:
    if not table.rows:
        return []
    cells = [["-" if value is None or value == "" else escape(str(value)) for value in row] for row in table.rows]
    return lay_out([[title.upper() for title in table.titles], *cells])


VERBS = {
    "verify": Verb(OfAny, _verify),
    "pin": Verb(Pinning, _pin),
    "unpin": Verb(OfCheckpoint, _unpin),
    "silence": Verb(Silencing, _silence),
    "unsilence": Verb(ActionRequest, _unsilence),
    "clear": Verb(OfCheckpoint, _clear),
    "accept": Verb(OfCheckpoint, _accept),
    "prune": Verb(Rules, _prune),
    "replicate": Verb(ActionRequest, _replicate),
    "repair": Verb(OfAny, _repair),
    "rollback": Verb(Going, _rollback),
}
