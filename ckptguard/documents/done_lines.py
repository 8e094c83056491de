"""What an operation did, or would do, as lines for people: the command line prints them, and a dashboard shows them.

Every name that came from a file is escaped here, once.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptguard.documents.report_lines import Line, Table
from ckptguard.records.who_and_when import utc_text
from ckptguard.values.ids import escape, step_text
from ckptguard.values.plain_numbers import made_again, size

if TYPE_CHECKING:
    from ckptguard.recover.roll_back import RolledBack, Undone
    from ckptguard.repair.repair import Repaired
    from ckptguard.replicas.replicate import Replica
    from ckptguard.replicas.send_checkpoint import Replicated
    from ckptguard.retention.prune import Pruned
    from ckptguard.runs.find_known_good import SavePart
    from ckptguard.values.silence import Silence


def silence_text(silence: Silence) -> str:
    """Until when a run is silenced, by whom and why."""
    if silence.until is None:
        return "by a record that cannot be read: messages are sent"
    return f"until {utc_text(silence.until)}, by {silence.by}" + (f": {silence.reason}" if silence.reason else "")


def silenced_mark(silence: Silence | None) -> str:
    """What a line about a run says beside the rest if it is silenced."""
    return "" if silence is None or silence.until is None else " (silenced)"


def prune_table(done: Pruned) -> Table:
    """A row for each checkpoint: whether it stays, and why."""
    rows = []
    for decision in done.decisions:
        one, word = decision.checkpoint, "keep" if decision.keep else "remove"
        outcome = "changed" if one.changed else one.outcome.value
        rows.append((f"{one.path}{one.id.nth_save}", outcome, word, size(one.bytes), "; ".join(decision.reasons)))
    return Table(("path", "outcome", "decision", "size", "reasons"), rows)


def prune_lines(done: Pruned) -> Iterator[Line]:
    """What a policy removes, in all."""
    freed = sum(d.checkpoint.bytes for d in done.removed)
    yield Line(f"{'would move' if done.dry_run else 'moved'} {len(done.removed)} to the trash ({size(freed)})")
    for one in done.thinned:
        if one.reason:
            yield Line(f"{escape(one.path)} stays whole: {one.reason}")
        else:
            files = ", ".join(escape(path.removeprefix(f"{one.path}/")) for path in one.files[:3])
            more = f" and {len(one.files) - 3} more files" if len(one.files) > 3 else ""
            did = "would take" if done.dry_run else "took"
            what, it = f"{files}{more} from {escape(one.path)}", "them"
            if one.anew:
                inside = f" of {escape(one.path)}" if one.files != (one.path,) else ""
                what, it = f"optimizer state out of {files}{more}{inside}", "it"
            yield Line(f"{did} {what} ({size(one.bytes)}): only a resume needs {it}")
    if (budget := done.budget) is not None:
        waiting = f", {size(budget.in_trash)} of these in the trash" if budget.in_trash else ""
        used = f"{size(budget.used)} of {size(budget.keep_bytes)} are used{waiting}"
        yield Line(f"budget: {used}; {size(budget.after)} are left once the trash is empty")
        if budget.why:
            yield Line(f"over budget: {escape(budget.why)}")
    if done.emptied:
        total = size(sum(mark.bytes for mark in done.emptied))
        would = "would remove" if done.dry_run else "removed"
        yield Line(f"{would} {len(done.emptied)} from the trash for good ({total})")


def replica_table(replica: Replica) -> Table:
    """A row for each checkpoint: what was done about it."""
    rows = [(c.path, c.id, c.done, size(c.bytes), c.message or _sent_remark(c)) for c in replica.checkpoints]
    return Table(("path", "id", "done", "size", "remark"), rows)


def _sent_remark(one: Replicated) -> str | None:
    if one.done != "sent":
        return None
    return f"verified: read back{f'; {size(one.shared)} of it were there already' if one.shared else ''}"


def replica_pruned_lines(done: Pruned) -> Iterator[Line]:
    """What the rule of a replica's place removes there."""
    for one in done.removed:
        did = "would move" if done.dry_run else "moved"
        yield Line(f"{did} {escape(one.checkpoint.path)} to its trash: its rule keeps it no longer")
    yield from itertools.islice(prune_lines(done), 1, None)


def replica_line(replica: Replica) -> Line:
    """Where a replica stands."""
    return Line(f"{escape(replica.url)}: {current_verdict_text(replica)}")


def current_verdict_text(replica: Replica) -> str:
    """Where a replica stands, in a few words."""
    if replica.behind is None:
        return "what it holds is unknown"
    last = f"last good {replica.last_good}" if replica.last_good else "nothing good yet"
    return f"{last}, {f'behind by {replica.behind}' if replica.behind else 'up to date'}"


def repair_lines(done: Repaired, *, only_wrong: bool = False) -> Iterator[Line]:
    """A line for each damaged file, and for each new verdict. `only_wrong` leaves out what is well."""
    for file in done.files:
        what = f"the kept copy's {escape(file.file)}" if file.place == "kept" else escape(file.file)
        if not file.repaired and file.source is None:
            yield Line(f"could not repair {what}{file.id.nth_save}: {escape(file.reason)}")
        elif not file.repaired or not only_wrong:
            did = "repaired" if file.repaired else "would repair"
            yield Line(f"{did} {what}{file.id.nth_save} from the {file.source}")
    for checked in done.checked:
        word = checked.outcome.value
        if word != "good" or not only_wrong:
            nth = checked.id.nth_save if checked.id else ""
            yield Line("", word, f"{'':{10 - len(word)}} {escape(checked.path)}{nth}")
    if not only_wrong and not done.files and not done.checked and not done.could_not_tell:
        yield Line("nothing is known to be damaged; `ckptguard scrub` looks for damage")


def rollback_lines(done: RolledBack, reports: Sequence[str] = ()) -> Iterator[Line]:
    """Where a rollback went, what it moved, and what names hold now. `reports` are those of the incidents that it
    closed."""
    dry_run = done.dry_run
    for path in done.unverified if dry_run else ():
        yield Line(f"would first verify {escape(path)}, and go back to it if it is good; else:")
    yield Line("; ".join(filter(None, (_went_words(done), escape(done.copied), _report_words(reports)))))
    for part in done.known_good.save:
        yield Line(f"  {_part_text(part)}")
    for path in done.quarantined:
        yield Line(f"{'would quarantine' if dry_run else 'quarantined'} {escape(path)}")
    for given in done.given:
        what = "its own content" if given.source == given.path else escape(given.source)
        yield Line(f"{'would fill' if dry_run else 'filled'} {escape(given.path)} with {what}{given.id.nth_save}")
    for pointer in done.pointed:
        yield Line(f"{'would point' if dry_run else 'pointed'} {escape(pointer.key)} at {escape(pointer.path)}")
    for mention in done.mentions:
        yield Line(f"{escape(mention.key)} mentions {escape(mention.path)} and stays as it is: change it if it is read")
    for one in done.newer_alone if dry_run else ():  # afterwards it is in quarantine
        only = escape(shlex.quote(one.series))
        yield Line(
            f"{escape(one.path)} is good, and the rest of its save is not: "
            f"`--only {only}` goes back to it alone, beside older parts"
        )


def _went_words(done: RolledBack) -> str:
    """Say from where to where a rollback went, and how much is made again."""
    went = f"{'would go' if done.dry_run else 'went'} back to {escape(done.known_good.path)}{done.source.nth_save}"
    if done.repeats is None:
        return went
    (first, last), noun = done.repeats, "epoch" if "epoch" in done.known_good.series else "step"
    again = made_again(last - first + 1, noun, done.repeats_seconds)
    return f"{went} from {noun} {last}: {again}, with all of their batches"


def _report_words(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more beside it" if len(paths) > 1 else ""
    return f"the report: {escape(paths[-1])}{more}" if paths else ""


def _part_text(part: SavePart) -> str:
    """Say which checkpoint a save consists of, where it is, and why it belongs to it."""
    name = part.series if part.step is None else f"{part.series} {step_text(part.step)}"
    age = f", {part.behind} saves earlier" if part.behind > 1 else ", one save earlier" if part.behind else ""
    return f"{escape(name)}{part.id.nth_save}: {part.role}, {part.place}{age}, joined by {part.rule}"


def undone_lines(done: Undone) -> Iterator[Line]:
    """The pointers that hold again what they held before a rollback."""
    for key in done.pointers:
        yield Line(f"put back {escape(key)}")
