"""What an operator may have done to a run. Each verb is one operation of the engine, with its plan: the words of the
command line's dry run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckptguard.decisions.known_good import Standing
from ckptguard.decisions.retention import unknown_metrics
from ckptguard.documents.build import fields
from ckptguard.documents.done_lines import (
    Table,
    prune_lines,
    prune_table,
    repair_lines,
    replica_line,
    replica_table,
    rollback_lines,
)
from ckptguard.documents.report_lines import Line, checked_lines, report_lines
from ckptguard.errors import NotFoundError, SettingsError
from ckptguard.layouts import Checkpoint
from ckptguard.records.pins import Pin
from ckptguard.recover.roll_back import GoBack, RolledBack, known_good_of, roll_back
from ckptguard.repair.repair import Repaired, repair
from ckptguard.replicas.replicate import Replica, replica_urls, replicate
from ckptguard.reporting.incidents_of_saves import IncidentsOfSaves
from ckptguard.reporting.open_and_close import close_incidents_about
from ckptguard.retention.pin import lasts_until, pin, pinned_id, pins_on, release
from ckptguard.retention.prune import Pruned, prune
from ckptguard.runs.run_view import RunView, select_checkpoint
from ckptguard.runs.target import Target
from ckptguard.terminal.columns import lay_out
from ckptguard.values.ids import CheckpointId, escape, id_from_record
from ckptguard.values.retention_policy import parse_span
from ckptguard.values.verdict import Outcome
from ckptguard.verification.selection import Selection
from ckptguard.verification.target import verify_resolved
from ckptguard.verification.user_decisions import accept, clear_standing, suspect_named
from ckptguard_daemon.dashboard.asked import (
    Agree,
    Asked,
    Done,
    Going,
    OfAny,
    OfCheckpoint,
    OfRun,
    Pinning,
    Plan,
    Rules,
    Verb,
)
from ckptguard_daemon.log import log

SOURCE = "dashboard"


# verify


def _plan_verify(asked: Asked) -> Plan:
    chosen = _target(asked)
    found = [chosen.checkpoint] if chosen.checkpoint is not None else list(asked.view.checkpoints)
    if not found:
        raise NotFoundError(f"there is no checkpoint in {asked.view.run.url}")
    size = sum(checkpoint.bytes for checkpoint in found)
    lines = [f"would read every byte of {escape(c.path)}, and record the verdict" for c in found]
    return Plan(lines=tuple(lines), costs={"bytes_read": size}, about=[_files(c) for c in found])


def _verify(asked: Asked, agree: Agree) -> Done:
    agree(_plan_verify(asked))
    hooks = asked.guarded.hooks
    what = Selection(wait=asked.settings.settle + 1)
    with IncidentsOfSaves(asked.settings, source=SOURCE, log=log, tell=hooks.tell) as incidents:
        report = verify_resolved(_target(asked), asked.settings, what, judged=incidents.judged, work=asked.work)
    lines = [*_texts(report_lines(report)), *(escape(note) for note in report.notes)]
    return Done(lines=tuple(lines), well=not report.could_not_tell)


def _target(asked: Asked) -> Target:
    view = asked.view
    if asked.arguments.checkpoint is None:
        return Target(url=view.run.url, kind="run", storage=view.run.storage, view=view)
    checkpoint = _checkpoint(asked)
    url = view.run.usable(checkpoint.path)
    return Target(url=url, kind="checkpoint", storage=view.run.storage, checkpoint=checkpoint, view=view)


# pin, unpin


def _plan_pin(asked: Asked) -> Plan:
    checkpoint, until = _checkpoint(asked), asked.arguments.until
    if until is not None:
        lasts_until(until)
    line = f"would pin {escape(checkpoint.path)}" + (f" until {escape(until)}" if until is not None else "")
    return Plan(lines=(line,), about=[str(pinned_id(asked.view, checkpoint)), _files(checkpoint)])


def _pin(asked: Asked, agree: Agree) -> Done:
    agree(_plan_pin(asked))
    checkpoint, until = _checkpoint(asked), asked.arguments.until
    pinned = pin(asked.view, checkpoint, note=asked.reason, lasts=None if until is None else lasts_until(until))
    return Done(lines=(f"pinned {escape(checkpoint.path)}" + (f" until {pinned.until}" if pinned.until else ""),))


def _plan_unpin(asked: Asked, found: Sequence[Pin] | None = None) -> Plan:
    checkpoint = _checkpoint(asked)
    found = pins_on(asked.view, checkpoint) if found is None else found
    lines = [f"would remove a pin of {escape(checkpoint.path)}: {escape(one.note) or one.since}" for one in found]
    return Plan(lines=tuple(lines), about=sorted(one.key for one in found))


def _unpin(asked: Asked, agree: Agree) -> Done:
    checkpoint = _checkpoint(asked)
    found = pins_on(asked.view, checkpoint)
    agree(_plan_unpin(asked, found))
    release(asked.view, found)
    return Done(lines=(f"unpinned {escape(checkpoint.path)}",))


# clear, accept


def _plan_clear(asked: Asked, standing: Standing | None = None) -> Plan:
    word = asked.arguments.checkpoint
    standing = suspect_named(asked.view, word) if standing is None else standing
    line = f"would say that {escape(word)} is good, for the reason that you give"
    return Plan(lines=(line,), about=[str(standing.id), standing.id.series, standing.number])


def _clear(asked: Asked, agree: Agree) -> Done:
    word = asked.arguments.checkpoint
    standing = suspect_named(asked.view, word)
    agree(_plan_clear(asked, standing))
    verdict = clear_standing(asked.view, standing, word, reason=asked.reason)
    close_incidents_about(asked.view.run, id=verdict.id, action=f"cleared: {asked.reason}")
    return Done(lines=(f"{escape(word)} is {verdict.outcome.value}",))


def _plan_accept(asked: Asked) -> Plan:
    checkpoint = _checkpoint(asked)
    return Plan(
        lines=(
            f"would take the tensors of {escape(checkpoint.path)} as the reference from now on",
            f"would verify {escape(checkpoint.path)} again",
        ),
        costs={"bytes_read": 2 * checkpoint.bytes},
        about=_files(checkpoint),
    )


def _accept(asked: Asked, agree: Agree) -> Done:
    agree(_plan_accept(asked))
    path = _checkpoint(asked).path
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


def prune_plan(done: Pruned) -> Plan:
    """Return the plan that a dry run of retention found."""
    return Plan(
        lines=(*_rows(prune_table(done)), *prune_words(done)),
        costs={
            "bytes_moved": sum(d.checkpoint.bytes for d in done.removed),
            "bytes_deleted": sum(mark.bytes for mark in done.emptied),
        },
        about=[
            [[d.checkpoint.path, str(d.checkpoint.id), d.checkpoint.bytes] for d in done.removed],
            [[mark.folder, mark.bytes] for mark in done.emptied],
        ],
    )


def dry_prune(view: RunView, rules: Rules) -> Pruned:
    """Return what these rules would remove. Nothing is changed."""
    settings = rules.settings(view.settings)
    grace = parse_span(settings.trash_grace)
    return prune(view, settings.retention(), grace=grace, dry_run=True)


def _plan_prune(asked: Asked) -> Plan:
    return prune_plan(dry_prune(asked.view, asked.arguments))


def _prune(asked: Asked, agree: Agree) -> Done:
    settings = asked.arguments.settings(asked.settings)
    grace = parse_span(settings.trash_grace)
    done = prune(
        asked.view,
        settings.retention(),
        grace=grace,
        agree=lambda planned: agree(prune_plan(planned)),
    )
    return Done(
        lines=(*_texts(prune_lines(done)), *(f"error: {escape(sentence)}" for sentence in done.could_not_tell)),
        well=not done.could_not_tell,
    )


# replicate


def _plan_replicate(asked: Asked) -> Plan:
    return _replicating(asked)[1]


def _replicating(asked: Asked) -> tuple[dict[str, list[CheckpointId]], Plan]:
    """Return what each replica would be sent, and the plan."""
    places = replica_urls(asked.view.run.url, asked.settings)
    if not places:
        raise SettingsError("there is no place to replicate to: set `replicas` in the settings")
    found = [(place, replicate(asked.view, place, dry_run=True)) for place in places]
    sent = {place: [c for c in replica.checkpoints if c.done == "would send"] for place, replica in found}
    plan = Plan(
        lines=tuple(line for _, replica in found for line in _replica_lines(replica)),
        costs={"bytes_sent": sum(c.bytes for one in sent.values() for c in one)},
        about=[[place, [[str(c.id), c.path] for c in one]] for place, one in sent.items()],
    )
    return {place: [c.id for c in one] for place, one in sent.items()}, plan


def _replicate(asked: Asked, agree: Agree) -> Done:
    sent, plan = _replicating(asked)
    agree(plan)
    found = [replicate(asked.view, place, work=asked.work, only=ids) for place, ids in sent.items()]
    wrong = {"failed", "damaged"}
    return Done(
        lines=tuple(line for replica in found for line in _replica_lines(replica)),
        well=not any(r.trouble is not None or wrong & {c.done for c in r.checkpoints} for r in found),
    )


def _replica_lines(replica: Replica) -> list[str]:
    trouble = [] if replica.trouble is None else [f"error: {escape(replica.url)}: {escape(replica.trouble)}"]
    return [replica_line(replica).text, *_rows(replica_table(replica)), *trouble]


# repair


def _plan_repair(asked: Asked) -> Plan:
    return _repair_plan(repair(asked.view, _damaged(asked), dry_run=True, work=asked.work))


def _damaged(asked: Asked) -> str | None:
    word = asked.arguments.checkpoint
    return None if word is None else _path_and_id(asked.view, word)[0]


def _repair_plan(done: Repaired) -> Plan:
    return Plan(
        lines=_repaired(done),
        about=[
            [fields(file) for file in done.files],
            [[c.path, c.outcome.value] for c in done.checked],
            list(done.could_not_tell),
        ],
    )


def _repair(asked: Asked, agree: Agree) -> Done:
    done = repair(
        asked.view,
        _damaged(asked),
        work=asked.work,
        agree=lambda planned: agree(_repair_plan(planned)),
    )
    left = any(not file.repaired for file in done.files)
    return Done(lines=_repaired(done), well=not (left or done.still_bad or done.could_not_tell))


def _repaired(done: Repaired) -> tuple[str, ...]:
    return (*_texts(repair_lines(done)), *(f"error: {escape(sentence)}" for sentence in done.could_not_tell))


# rollback


def _plan_rollback(asked: Asked) -> Plan:
    return _rollback_plan(asked, roll_back(asked.view, _back(asked, dry_run=True), work=asked.work))


def _back(asked: Asked, **how: Any) -> GoBack:
    to, step = asked.arguments.to, asked.arguments.step
    if to is not None and step is not None:
        raise SettingsError("give `to` or `step`, not both")
    id = None if to is None and step is None else known_good_of(asked.view, to, step)
    reason = asked.reason or "rolled back from the dashboard"
    return GoBack(reason=reason, to_id=id, force=asked.arguments.force, **how)


def _rollback_plan(asked: Asked, done: RolledBack) -> Plan:
    view = asked.view
    moved = [found for path in done.quarantined if (found := view.checkpoint(path)) is not None]
    manifest = view.history.manifest(done.source)
    return Plan(
        lines=_rolled_back(done),
        costs={"bytes_read": 0 if manifest is None else manifest.bytes, "bytes_moved": sum(c.bytes for c in moved)},
        about=[fields(done), str(done.source), done.source.series, [_files(c) for c in moved]],
    )


def _rollback(asked: Asked, agree: Agree) -> Done:
    def agreed(planned: RolledBack) -> None:
        agree(_rollback_plan(asked, planned))

    done = roll_back(asked.view, _back(asked, agree=agreed), work=asked.work)
    good = str(done.known_good.id)
    close_incidents_about(asked.view.run, done.quarantined, action=f"went back to {good}", known_good=good)
    return Done(lines=_rolled_back(done))


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
    "verify": Verb(arguments=OfAny, plan=_plan_verify, do=_verify),
    "pin": Verb(arguments=Pinning, plan=_plan_pin, do=_pin),
    "unpin": Verb(arguments=OfCheckpoint, plan=_plan_unpin, do=_unpin),
    "clear": Verb(arguments=OfCheckpoint, plan=_plan_clear, do=_clear),
    "accept": Verb(arguments=OfCheckpoint, plan=_plan_accept, do=_accept),
    "prune": Verb(arguments=Rules, plan=_plan_prune, do=_prune),
    "replicate": Verb(arguments=OfRun, plan=_plan_replicate, do=_replicate),
    "repair": Verb(arguments=OfAny, plan=_plan_repair, do=_repair),
    "rollback": Verb(arguments=Going, plan=_plan_rollback, do=_rollback),
}
