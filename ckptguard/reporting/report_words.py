"""What every form of an incident's report says: its sentences and its tables. Pure; what comes from files is escaped by
the form."""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ckptguard.formats.dtypes import FP16_LIMIT
from ckptguard.reporting.onset import has_onset
from ckptguard.values.ids import parse_id
from ckptguard.values.incident import ChangedTensor, IncidentReport, Magnitude, SickTensor, Training

CAUSES = {
    "weights": "Weights or optimizer state are not finite",
    "grad_norm": "The gradient norm is not finite",
    "nan_loss": "The loss is NaN again and again",
    "loss_scale": "The loss scale keeps falling",
    "spike": "Loss or gradients spiked",
    "damage": "A checkpoint is damaged",
    "storage": "A checkpoint could not be saved",
    "unsaved": "No checkpoint was saved for too long",
    "crash": "Training crashed",
    "anew": "Training began from scratch instead of going on",
    "asked": "Training was asked to go back",
    "numeric": "Numbers are not finite",
}

_NOTICED_BY = {
    "guard": "the training guard",
    "callback": "the callback in the Trainer",
    "daemon": "the daemon",
    "supervise": "ckptguard supervise",
    "gate": "ckptguard gate",
    "cli": "the command line",
}

NO_SICKNESS = ("storage", "unsaved", "asked", "anew")  # training itself is well
_IDS = ("checkpoint", "series", "kept_copy", "verdict")
_MOST_INDICES = 16  # of a place in a tensor: a record may hold any number
_MOST_ROWS = 12
_SMALLEST_BAR = 1e-3  # the magnitude at which a bar begins


class ReportRow(NamedTuple):
    """One row of a table. The name is in the last cell. `mark` and `bar` (its length, 0 to 1) are for a page."""

    cells: tuple[str, ...]
    mark: str = ""
    bar: float | None = None


class ReportTable(NamedTuple):
    """A section of rows, with what they are and how many more there are. `warning`: why these may not be all."""

    name: str
    note: str
    titles: tuple[str, ...]
    rows: tuple[ReportRow, ...]
    omitted: int
    warning: str | None = None


def title(report: IncidentReport) -> str:
    """What happened, in a few words."""
    what, path = CAUSES.get(report.cause, f"Incident: {report.cause}"), report.evidence.get("path")
    if report.cause == "damage":
        return f"{what}: {path}" if isinstance(path, str) else what
    return f"{what} at step {report.step}" if report.step is not None else what


def outcome(report: IncidentReport) -> str:
    """The result of the incident, in one sentence."""
    words = {"open": "nothing has been done about it yet", "handling": "training is going back right now"}
    return report.actions[-1] if report.actions else words.get(report.state, report.state)


def noticed_by(report: IncidentReport) -> str:
    """Who noticed it."""
    return _NOTICED_BY.get(report.source, report.source)


def shown(value: object) -> str:
    """A value as people read it; empty where it is not known."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def when(moment: str) -> str:
    """A time of the records, without its letters; as it is where it is none."""
    try:
        return datetime.datetime.fromisoformat(moment).astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return moment


def known_facts(report: IncidentReport) -> list[tuple[str, str]]:
    """Training configuration, and what it began from: (name, value), only what is known."""
    known, resumed = report.details.training or Training(), report.details.resumed
    good = report.details.last_good
    saved = resumed.world_size if resumed else good.world_size if good else None
    total = sum(known.dtypes.values())
    pairs: list[tuple[str, object]] = [
        ("parameters", ", ".join(f"{name}: {count:,}" for name, count in known.dtypes.items()) if total else None),
        ("autocast", known.autocast),
        ("loss scaler", known.loss_scaler),
        ("scaler that the guard was not given", known.scaler_not_given),
        ("device", known.device),
        ("bf16 in hardware", known.hardware_bf16),
        ("optimizer", known.optimizer),
        ("eps", known.eps),
        ("learning rate", known.lr),
        ("weight decay", known.weight_decay),
        ("scheduler", known.scheduler),
        ("ranks now", known.world_size),
        ("ranks at the save", saved),
        (
            "began from",
            resumed and (f"{resumed.path} (step {resumed.step})" if resumed.path else f"step {resumed.step}"),
        ),
        ("training loop", known.framework),
        ("started from scratch", resumed and ", ".join(resumed.anew)),
        ("missing keys", resumed and few(resumed.missing)),
        ("unexpected keys", resumed and few(resumed.unexpected)),
        *((f"{name} version", version) for name, version in known.versions.items()),
    ]
    return [(name, shown(value)) for name, value in pairs if value not in (None, "")]


def onset_words(report: IncidentReport) -> str | None:
    """When harm began, as far as the records show it; None where there is nothing to be said."""
    first, last = report.details.onset, report.onset_last
    if last is None or not has_onset(report.cause):
        return None
    if first is None:
        return f"step {last} or before"
    return f"between {first} and {last}" if is_range(report) else f"step {first}"


def is_range(report: IncidentReport) -> bool:
    """Whether harm began at any of several updates."""
    return report.details.onset is not None and (report.onset_last or 0) > report.details.onset


def onset_note(report: IncidentReport) -> str | None:
    """Why the onset is a range, where it is one."""
    if not is_range(report) or not has_onset(report.cause):
        return None
    return "no record in between shows at which of these updates"


def noticed_words(report: IncidentReport) -> str:
    """Where it was noticed, and how long after it began; empty where neither is known."""
    path, first, last = report.evidence.get("path"), report.details.onset, report.onset_last
    where = f"in {path}" if isinstance(path, str) else f"step {report.step}" if report.step is not None else ""
    if report.step is None or first is None or last is None or not has_onset(report.cause):
        return where
    least, most = report.step - last, report.step - first
    if most <= 0:
        return f"{where}, in that very update"
    late = f"{least} to {most}" if 0 < least < most else f"at most {most}" if least < most else f"{most}"
    return f"{where}, {late} update{'s' * (most > 1)} later"


def last_good(report: IncidentReport) -> str | None:
    """The last good checkpoint, by its path; None where none is known."""
    good, named = report.details.last_good, report.known_good
    if good is not None and good.step is None and report.details.first_bad is not None:
        return f"an earlier save of {good.path}" if good.path == report.details.first_bad.path else good.path
    if good is not None:
        return good.path + (f" (step {good.step})" if good.step is not None else "")
    known = parse_id("", named) if named is not None else None
    if known is None:
        return named
    return f"that of step {known.number}" if known.number is not None else "no longer on record"


def evidence_pairs(report: IncidentReport) -> list[tuple[str, str]]:
    """What the one who noticed wrote down."""
    hidden = _IDS if "path" in report.evidence else ()  # the path says it
    pairs = ((name, value) for name, value in sorted(report.evidence.items()) if name not in hidden)
    return [(str(name).replace("_", " "), shown(value)) for name, value in pairs if value is not None]


def tensor_line(tensor: SickTensor) -> str:
    """What is wrong with a tensor."""
    if tensor.what is not None:
        return tensor.what
    if tensor.elements is not None and tensor.elements in (tensor.nan, tensor.inf):
        return f"all {tensor.elements:,} are {'NaN' if tensor.nan else 'Inf'}"
    counts = [f"{n:,} {name}" for n, name in ((tensor.nan, "NaN"), (tensor.inf, "Inf")) if n]
    of = f" of {tensor.elements:,}" if tensor.elements is not None else ""
    return (", ".join(counts) or "not finite") + of


def change_line(change: ChangedTensor) -> str:
    """How a tensor of the first bad checkpoint differs from that of the last good one."""
    of = f" of {change.elements:,}" if change.elements is not None else ""
    if change.became_nonfinite and change.became_nonfinite == change.elements:
        return f"all {change.elements:,} became NaN or Inf"
    if change.became_nonfinite:
        where = f", first at {list(change.first_nonfinite[:_MOST_INDICES])}" if change.first_nonfinite else ""
        return f"{change.became_nonfinite:,}{of} became NaN or Inf{where}"
    parts = [change.change] if change.change != "changed" or change.relative_l2 is None else []
    if change.relative_l2 is not None:
        how = f"by {change.relative_l2:.2%}" if isinstance(change.relative_l2, float) else "from zero"
        parts.append(how if parts else f"changed {how}")
    if change.largest_change is not None:
        parts.append(f"at most {shown(change.largest_change)}")
    if change.note is not None:
        parts.append(change.note)
    return ", ".join(parts)


def share_of_fp16(largest: float | None) -> str:
    """A magnitude as a share of the largest number of fp16."""
    if largest is None or not math.isfinite(largest):
        return ""
    share = largest / FP16_LIMIT
    return "<0.01%" if 0 < share < 1e-4 else f"{share:.2%}"


def tables(report: IncidentReport) -> list[ReportTable]:
    """What is not finite, what changed, and how near to the end of fp16 the last good weights are."""
    return [table for table in (_sick_tensors(report), _changes(report), _headroom(report)) if table is not None]


def _sick_tensors(report: IncidentReport) -> ReportTable | None:
    details = report.details
    note = "Not finite in memory when it was noticed, in the order of the model."
    if details.tensors_from not in (None, "memory"):
        note = f"What is wrong in {details.tensors_from}, in the order of its tensors."
    rows = [ReportRow((tensor.kind, tensor_line(tensor), tensor.name)) for tensor in details.tensors]
    titles = ("kind", "what", "tensor")
    return _table("What is not finite, or wrong", note, titles, rows, details.tensors_omitted) if rows else None


def _changes(report: IncidentReport) -> ReportTable | None:
    details = report.details
    if not _are_compared(report) or details.first_bad is None:
        return None
    pair = f"From {last_good(report)} to {details.first_bad.path}."
    note = f"{pair} At the top is what became NaN or Inf, then what changed most."
    rows = [
        ReportRow(
            (shown(c.largest), share_of_fp16(c.largest), change_line(c), _named(c)),
            mark="became" if c.became_nonfinite else "",
        )
        for c in details.changes
    ]
    titles = ("largest before", "of fp16", "change", "tensor")
    return _table("What changed", note, titles, rows, details.changes_omitted, details.changes_note)


def _named(change: ChangedTensor) -> str:
    return change.name if change.role == "model" else f"{change.name} ({change.role})"


def _are_compared(report: IncidentReport) -> bool:
    details = report.details
    found = bool(details.changes or details.changes_note)
    return found and details.last_good is not None and details.first_bad is not None


def _headroom(report: IncidentReport) -> ReportTable | None:
    good = report.details.last_good
    if good is None or not good.largest:
        return None
    note = f"The largest magnitudes in {last_good(report)}, the last good checkpoint. fp16 ends at 65504."
    rows = [_magnitude(one) for one in good.largest]
    return _table("Headroom in fp16", note, ("largest", "of fp16", "tensor"), rows)


def _magnitude(one: Magnitude) -> ReportRow:
    """A row with a bar, which is logarithmic."""
    share = one.largest / FP16_LIMIT if math.isfinite(one.largest) else 2.0
    decades = math.log10(FP16_LIMIT / _SMALLEST_BAR)
    length = 1.0 + math.log10(share) / decades if share > 0 else 0.0
    mark = "high" if share > 0.5 else "near" if share > 0.1 else "far"
    return ReportRow((shown(one.largest), share_of_fp16(one.largest), one.tensor), mark, min(1.0, max(0.0, length)))


def _table(
    name: str,
    note: str,
    titles: tuple[str, ...],
    rows: Sequence[ReportRow],
    omitted: int = 0,
    warning: str | None = None,
) -> ReportTable:
    """The first of some rows; `omitted` were left out before."""
    left = max(0, len(rows) - _MOST_ROWS) + omitted
    return ReportTable(name, note, titles, tuple(rows[:_MOST_ROWS]), left, warning)


def loss_note(report: IncidentReport) -> str | None:
    """What a logged loss of exactly 0 means beside a gradient norm that is not finite."""
    zero = [s for s in report.details.samples if s.loss == 0.0 and isinstance(s.grad_norm, str)]
    return "a loss of exactly 0 beside such a gradient norm stands for NaN: the Trainer prints it so" if zero else None


def next_commands(report: IncidentReport) -> list[tuple[str, str]]:
    """What to run next, and what for."""
    run = shlex.quote(report.run)
    commands = [(f"ckptguard status {run}", "am I protected now?")]
    if report.state == "open" and report.cause not in NO_SICKNESS:
        commands.insert(0, (f"ckptguard rollback {run}", "make the last known-good checkpoint the newest"))
    good, bad = report.details.last_good, report.details.first_bad
    if bad is not None:
        commands.append((f"ckptguard bisect {run}", "which save was the first bad one, and which tensors it names"))
    if good is not None and (len(good.largest) < 2 or (bad is not None and not _are_compared(report))):
        read = f"ckptguard incident {run} {report.id} --read"
        commands.append((read, "this report, with both checkpoints read and compared"))
    return commands


def few(names: Sequence[str], most: int = 5) -> str:
    """The first names of some, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
