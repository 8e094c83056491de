"""One function that turns any result into JSON values, and one table of exceptions: other keys, order or values.

A type without a form has the keys of all its fields, in order, also those that records omit as defaults. Ids are text,
and enums their word.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from ckptguard.values.ids import CheckpointId

SCHEMA = 1
Document = dict[str, Any]


def document(command: str | None, /, **parts: object) -> Document:
    """Return the keys that every document starts with, then its own in the given order."""
    return {"schema": SCHEMA, "command": command, **{key: plain(value) for key, value in parts.items()}}


def fields(value: Any, form: str = "", **instead: object) -> Document:
    """Return the keys of one result in the order of its form, else of its fields.

    `instead` holds values that replace its own. An unset field has no key; an unknown value is null.
    """
    found: Document = {}
    kind: Any = type(value)
    for key, get, inner in _readers(kind, form):
        part = instead[key] if key in instead else get(value)
        if part is not msgspec.UNSET:
            found[key] = plain(part, inner)
    return found


def plain(value: object, form: str = "") -> object:
    """Return the value as JSON. A number that is not finite is null, because JSON has no word for it."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, CheckpointId):
        return str(value)
    if isinstance(value, msgspec.Struct):
        return fields(value, form)
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, form) for inner in value]
    return plain(msgspec.to_builtins(value))


@functools.cache
def _readers(kind: type, name: str) -> tuple[tuple[str, Callable[[Any], object], str], ...]:
    """Return each key of a form, the reader of its value, and the form of that value."""
    names = [name] if name else [f"{base.__module__.rpartition('.')[2]}.{base.__name__}" for base in kind.__mro__]
    form = next((FORMS[known] for known in names if known in FORMS), Form())
    readers = []
    for word in form.keys.replace("*", " ".join(getattr(kind, "__struct_fields__", ()))).split():
        rest, _, inner = word.partition(">")
        key, _, attribute = rest.partition("=")
        if key in ("series", "step") and not attribute and not hasattr(kind, key):
            attribute = f"id.{key}"  # of types that only have an id
        readers.append((key, form.made.get(key) or operator.attrgetter(attribute or key), inner))
    return tuple(readers)


class Form(NamedTuple):
    """`keys` in their order: ``key``, ``key=attribute``, ``key>form of its value``. ``*`` means all fields.

    `made` has the values that no attribute holds.
    """

    keys: str = "*"
    made: Mapping[str, Callable[[Any], object]] = {}


def _share(holder: Any) -> object:
    from ckptguard.formats.dtypes import FP16_LIMIT

    return None if holder.largest is None else holder.largest / FP16_LIMIT


def _moment(seconds: float | None) -> object:
    from ckptguard.records.who_and_when import utc_text

    return None if seconds is None else utc_text(seconds)


def _all(counts: Mapping[str, int]) -> object:
    from ckptguard.values.verdict import Outcome

    return {outcome.value: counts.get(outcome.value, 0) for outcome in Outcome}


def _what_now(report: Any) -> object:
    from ckptguard.documents.report_lines import what_now

    return what_now(report)


def _heaviest_first(verdict: Any) -> object:
    from ckptguard.values.verdict import heaviest_first

    return heaviest_first(verdict.findings)  # older versions recorded them by check


def _stored_bytes(tensor: Any) -> object:
    from ckptguard.inspect.show import stored_bytes

    return stored_bytes(tensor)


def _kept(pruned: Any) -> object:
    gone = {decision.checkpoint.path for decision in pruned.removed}
    return [d for d in pruned.decisions if d.checkpoint.path not in gone]


def _whole_save(known: Any) -> object:
    from ckptguard.runs.good_checkpoint import alone

    return known.save or (alone(known.path, known.id, known.place),)


# By module and class; or by a name, if a type has a second form.
FORMS: dict[str, Form] = {
    # verify, show
    "results.VerifyReport": Form("target kind outcome checkpoints not_understood what_now", {"what_now": _what_now}),
    "results.Checked": Form("*", {"seconds": lambda c: None if c.seconds is None else round(c.seconds, 3)}),
    "verdict.Finding": Form("check severity file tensor count expected found message omitted"),
    "verdict.Verdict": Form("outcome checked_at version digests findings", {"findings": _heaviest_first}),
    "cleared": Form("series step id outcome checked_at version digests findings", {"findings": _heaviest_first}),
    "show.Shown": Form(
        "target series=manifest.series layout=manifest.layout step=manifest.step id sealed digest_origin"
        " counters=manifest.counters bytes=manifest.bytes metrics files=manifest.files verdict changed history>entry",
        {
            "digest_origin": lambda s: s.manifest.digest_origin if s.sealed else None,
            "metrics": lambda s: s.manifest.given_metrics(),
        },
    ),
    "entry": Form("number outcome"),  # of the ledger
    "manifest.Counter": Form("kind value source"),
    "manifest.File": Form("path size format md5 tensors"),
    "manifest.Tensor": Form(
        "name dtype shape role bytes largest rms fp16_headroom", {"bytes": _stored_bytes, "fp16_headroom": _share}
    ),
    # known-good, status, restore, rollback
    "good_checkpoint.KnownGood": Form(
        "path series step id kept place verified_at reason thinned save", {"save": _whole_save}
    ),
    "good_checkpoint.SavePart": Form("path series step id role place rule behind"),
    "list_saves.SaveOfSeveral": Form("good parts lacks"),
    "list_saves.SavedPart": Form("series step id rule behind good"),
    "known-good of the daemon": Form("path series step id kept verified_at reason place"),
    "status.Status": Form(
        "target=run protected explanation watched known_good known_good_age_seconds pending changed outcomes"
        " last_incident>incident daemon kept_kinds kept_bytes replicas>standing at_risk room not_understood"
        " without_md5=summary.without_md5 silence=summary.silence newest_bad thinned growth=summary.growth"
        " free=summary.free full_in=summary.full_in",
        {"newest_bad": lambda status: [state.path for state in status.newest_bad]},
    ),
    "silence.Silence": Form("*", {"until": lambda silence: _moment(silence.until)}),
    "standing": Form("url behind last_good trouble"),
    "restore.Restored": Form("path series step id outcome bytes kept source save"),
    "start_run.Started": Form(
        "path series step id outcome bytes kept source save", {"outcome": lambda _: "good", "kept": lambda _: False}
    ),
    "roll_back.RolledBack": Form(
        "dry_run known_good quarantined put_back given pointed mentions repeats repeats_seconds left_bad unverified"
        " newer_alone whole_again",
        {"unverified": lambda done: done.unverified if done.dry_run else ()},
    ),
    "roll_back.Undone": Form("pointers left"),
    "gate.Gated": Form("known_good attempt attempts joined spent rollback"),
    # diff, bisect, doctor, sums
    "replicate.Replica": Form("url behind last_good checkpoints trouble pruned"),
    "tensor_table.HeldTensor": Form("name file dtype shape"),
    "diff.Diff": Form("a b same counts prefixes changes omitted damaged", {"omitted": lambda _: 0}),
    "bisect.Bisection": Form("target series stages>stage last_good>stage first_bad>stage findings culprits diff notes"),
    "stage": Form("path id step outcome"),
    "doctor.StorageDiagnosis": Form("target=url outcome probes seconds"),
    "sums.Sums": Form("target id folder recorded files"),
    # incidents
    "incident": Form("format id revision step cause reason evidence opened_at state actions source known_good"),
    "line of incidents": Form(
        "id opened_at step onset onset_through cause reason state source actions known_good likely_cause",
        {
            "onset": lambda i: i.known_details().onset,
            "onset_through": lambda i: i.known_details().onset_through,
            "likely_cause": lambda i: next((c.name for c in i.known_details().causes), None),
        },
    ),
    "incident.IncidentReport": Form(
        "target=run id opened_at step onset onset_through=details.onset_through cause reason state source actions"
        " known_good evidence causes=details.causes tensors=details.tensors tensors_omitted=details.tensors_omitted"
        " tensors_from=details.tensors_from changes=details.changes changes_omitted=details.changes_omitted"
        " changes_note=details.changes_note last_good=details.last_good first_bad=details.first_bad"
        " training=details.training resumed=details.resumed samples=details.samples"
    ),
    "incident.LikelyCause": Form("name title confidence because advice"),
    "incident.ChangedTensor": Form("* fp16_headroom", {"fp16_headroom": _share}),
    "incident.Magnitude": Form("* fp16_headroom", {"fp16_headroom": _share}),
    "incident.CheckpointFacts": Form(
        "*", {"errors": lambda facts: [{"check": check, "message": said} for check, said in facts.errors]}
    ),
    # retention
    "prune.Pruned": Form("dry_run policy kept removed thinned budget emptied in_trash could_not_tell", {"kept": _kept}),
    "retention_policy.Policy": Form(
        "keep_last keep_every keep_within keep_best keep_good thin_after keep_bytes failed=drop_failed",
        {"keep_best": lambda policy: [str(best) for best in policy.keep_best]},
    ),
    "retention.RetentionDecision": Form(
        "path=checkpoint.path series=checkpoint.id.series step=checkpoint.id.step id=checkpoint.id"
        " outcome=checkpoint.outcome changed=checkpoint.changed bytes=checkpoint.bytes metrics=checkpoint.metrics"
        " reasons"
    ),
    "prune.ThinnedCheckpoint": Form("path series=id.series step=id.step id files anew bytes reason"),
    "budget.Budget": Form("keep_bytes used in_trash to_thin after why"),
    "trash.Trashed": Form("path series step id bytes removed_at"),
    "pins.Pin": Form("series step id reason note since until"),
    # scrub, repair, replicate
    "scrub.Reread": Form("path series step id place outcome bytes seconds findings"),
    "one_place.RepairedFile": Form("path series step id place file repaired source reason"),
    "send_checkpoint.Replicated": Form(
        "path series step id bytes done sent shared verified message",
        {"verified": lambda one: "read back" if one.done == "sent" else None},
    ),
    "scrub.Scrubbed": Form("stopped left places next could_not_tell"),
    "scrub.Due": Form("path id place last_read_at", {"last_read_at": lambda due: _moment(due.last)}),
    "repair.Repaired": Form("dry_run files checkpoints=checked could_not_tell"),
    # fleet
    "job.BulkDone": Form(
        "outcomes done left gone bytes seconds put_aside wrong rows could_not_tell",
        {"outcomes": lambda done: _all(done.outcomes)},
    ),
    "messages.Item": Form("run path id place outcome bytes seconds done message findings"),
    "job.RunRow": Form(
        "*",
        {
            "known_good_at": lambda row: _moment(row.known_good_at),
            "oldest_read_at": lambda row: _moment(row.oldest_read_at),
            "outcomes": lambda row: _all(row.outcomes),
            "bytes": lambda row: _all(row.bytes),
        },
    ),
    # the daemon
    "audit.Action": Form(
        "id verb state=so_far name role host=owner.host began_at ended_at reason arguments plan result"
    ),
    "healthz": Form("host boot_id pid started_at"),
    "watched_run.WatchedRun": Form(
        "id=run_id url state trouble passes last_pass_at pending=last_pass.pending scrub replicas>standing",
        {"trouble": lambda run: run.trouble and {"kind": run.trouble.kind, "message": run.trouble.message}},
    ),
    "watched_run.ScrubState": Form("every_seconds=every bytes_per_second=rate reading last next"),
    "watched_run.PlaceAt": Form("path id place at", {"at": lambda place: _moment(place.at)}),
}
