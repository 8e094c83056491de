"""Survey: what is known of every checkpoint of a run, without reading its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ckptguard.keep.copy_cost import own_bytes
from ckptguard.layouts import Checkpoint
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.names_by_step import ListedSteps
from ckptguard.records.run import Run
from ckptguard.records.trash import list_trashed
from ckptguard.runs.history import History, Key, history_of_step, load_history
from ckptguard.runs.listing import list_checkpoints
from ckptguard.runs.removal_holds import pins_of
from ckptguard.runs.sealed_content import kept_matches
from ckptguard.values.ids import checkpoint_id
from ckptguard.values.verdict import Outcome, Severity, Verdict


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of one checkpoint, present or recorded. `reason` is its heaviest finding, if any.
    `kept_bytes` is what its kept copy takes on storage that would be free without it; None if there is no copy, or
    that cannot be told (a reflink). `pins` say why it is pinned."""

    path: str
    series: str
    layout: str
    step: int | None
    id: str | None
    outcome: Outcome
    in_place: bool
    kept: bool
    kept_how: str | None
    quarantined: bool
    trashed: bool
    verified_at: str | None
    bytes: int | None
    kept_bytes: int | None
    pins: tuple[str, ...]
    reason: str


def survey(run: Run) -> tuple[CheckpointState, ...]:
    """Every checkpoint in place, then every recorded generation that is elsewhere or gone; by series and step."""
    history = load_history(run)
    kept, trash, pins = set(list_kept(run)), set(list_trashed(run)), pins_of(run)
    states: dict[tuple[str, Key], CheckpointState] = {}
    fresh: list[CheckpointState] = []
    for checkpoint in list_checkpoints(run):
        key = history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path)
        open_key = key or (checkpoint.step, history.next_generation(checkpoint.series, checkpoint.step))
        state = _state(run, history, checkpoint.series, open_key, kept, trash, pins, checkpoint)
        if open_key in history.standings(checkpoint.series) or key is not None:
            states[(checkpoint.series, open_key)] = state
        else:
            fresh.append(msgspec.structs.replace(state, id=None))
    for series in history.names:
        for key in history.standings(series):
            if (series, key) not in states:
                states[(series, key)] = _state(run, history, series, key, kept, trash, pins, None)
    everything = [*states.values(), *fresh]
    return tuple(sorted(everything, key=lambda s: (s.series, s.step is None, s.step or 0, s.id or "", s.path)))


def without_verdict(run: Run, listed: ListedSteps, *, above: int = -1) -> list[Checkpoint]:
    """The numbered checkpoints in place, of steps above this one, that `survey` calls PENDING. `listed`: the names in
    the records."""
    found = []
    for checkpoint in list_checkpoints(run):
        if checkpoint.step is not None and checkpoint.step > above:
            history = history_of_step(run, checkpoint.series, checkpoint.step, listed)
            key = history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path)
            key = key or (checkpoint.step, history.next_generation(checkpoint.series, checkpoint.step))
            if history.verdict(checkpoint.series, key) is None:
                found.append(checkpoint)
    return found


def _state(
    run: Run,
    history: History,
    series: str,
    key: Key,
    kept: set[tuple[str, int | None, int]],
    trash: set[tuple[str, int | None, int]],
    pins: Mapping[tuple[str, Key], Sequence[str]],
    checkpoint: Checkpoint | None,
) -> CheckpointState:
    verdict, manifest = history.verdict(series, key), history.manifest(series, key)
    copy = read_kept(run, series, *key) if (series, *key) in kept else None
    if copy is not None and manifest is not None and not kept_matches(run, copy, manifest):
        copy = None  # a hard link shares what was done to the original
    size = checkpoint.bytes if checkpoint else manifest.bytes if manifest else None
    return CheckpointState(
        path=checkpoint.path if checkpoint else manifest.path if manifest else series,
        series=series,
        layout=checkpoint.layout if checkpoint else manifest.layout if manifest else "",
        step=key[0],
        id=checkpoint_id(*key),
        outcome=verdict.outcome if verdict else Outcome.PENDING,
        in_place=checkpoint is not None,
        kept=copy is not None,
        kept_how=copy.how if copy else None,
        quarantined=key in history.quarantined.get(series, ()),
        trashed=(series, *key) in trash,
        verified_at=verdict.checked_at if verdict else None,
        bytes=size,
        kept_bytes=own_bytes(run, copy) if copy else None,
        pins=tuple(pins.get((series, key), ())),
        reason=heaviest_reason(verdict),
    )


def heaviest_reason(verdict: Verdict | None) -> str:
    """The message of the heaviest finding, with what it is about; "" where nothing weighs."""
    if verdict is None:
        return ""
    for severity in (Severity.ERROR, Severity.SICKNESS, Severity.WARNING):
        for finding in verdict.findings:
            if finding.severity is severity:
                about = finding.tensor or finding.file
                return f"{about}: {finding.message}" if about else finding.message
    return ""
