"""Survey: what is known about every checkpoint of a run, without reading its bytes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ckptguard.decisions.known_good import finest_counter
from ckptguard.keep.room import own_bytes
from ckptguard.layouts import Checkpoint
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.trash import list_trashed
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.history import History
from ckptguard.runs.removal_holds import pins_of
from ckptguard.runs.run_reader import RunReader, remembered
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import kept_matches
from ckptguard.values.ids import CheckpointId, Step, numbers_of
from ckptguard.values.verdict import Outcome


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of one checkpoint, present or recorded. `reason` is its heaviest finding, if any.

    - `changed`: storage describes the files in place differently than when they were read for `outcome`. They may be
      anything until they are read again.
    - `kept_bytes`: the space that its kept copy needs alone; None without a copy, or if unknown (a reflink).
    - `pins`: why it is pinned.
    """

    path: str
    series: str
    layout: str
    step: Step
    id: CheckpointId | None
    outcome: Outcome
    changed: bool
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
    counter: str | None = None  # the finest counter inside it, such as "iter_num 3500"


def survey(view: RunView) -> tuple[CheckpointState, ...]:
    """Return every checkpoint in place, then every recorded generation that is elsewhere or gone, by series and step.

    Checkpoints with unchanged records are not read again: what they said is in the view's memory, or in a file of this
    user. See `run_reader`.
    """
    with remembered(view) as reader:
        return states_by_reader(view, reader)


def states_by_reader(view: RunView, reader: RunReader) -> tuple[CheckpointState, ...]:
    """Do the same with a reader."""
    run, history = view.run, reader.history
    in_kept, in_trash, pins = set(list_kept(run)), set(list_trashed(run)), pins_of(run)

    def state_of(id: CheckpointId, checkpoint: Checkpoint | None) -> CheckpointState:
        """Return what is known about a generation, whose content is in this checkpoint if there is one."""
        verdict, sealed = reader.judged(id), reader.sealed(id)
        copy = read_kept(run, id) if id in in_kept else None
        if copy is not None:
            files = reader.sealed(id, files=True)
            if files is not None and not kept_matches(run, copy, files):
                copy = None  # a hard link shares changes to the original
        lies = checkpoint or sealed  # both have path, layout and size
        outcome, reason = (verdict.outcome, verdict.reason) if verdict else (Outcome.PENDING, "")
        if verdict and verdict.place_damaged and verdict.content and checkpoint is None and copy is not None:
            outcome, reason = verdict.content, ""  # the damage was to the file in place, which is gone
        return CheckpointState(
            path=lies.path if lies else id.series,
            series=id.series,
            layout=lies.layout if lies else "",
            step=id.step,
            id=id,
            outcome=outcome,
            changed=checkpoint is not None and reader.has_changed(id, checkpoint.entries),
            in_place=checkpoint is not None,
            kept=copy is not None,
            kept_how=copy.how if copy else None,
            quarantined=history.is_quarantined(id),
            trashed=id in in_trash,
            verified_at=verdict.checked_at if verdict else None,
            bytes=lies.bytes if lies else None,
            kept_bytes=own_bytes(run, copy) if copy else None,
            pins=tuple(pins.get(id, ())),
            reason=reason,
            counter=finest_counter(sealed.standpoint.counters) if sealed else None,
        )

    states: dict[CheckpointId, CheckpointState] = {}
    fresh: list[CheckpointState] = []
    for checkpoint in view.checkpoints:
        series, step = checkpoint.series, checkpoint.step
        id = history.current_if_readable(series, step, checkpoint.path, path_of=reader.sealed_path)
        own = id or history.next_id(series, step)
        state = state_of(own, checkpoint)
        if id is not None or history.has_verdict(own):
            states[own] = state
        else:
            fresh.append(msgspec.structs.replace(state, id=None))
    for series in history.names:
        for id in history.standings(series):
            if id not in states and (reader.judged(id) or reader.sealed(id) or id in in_kept or id in in_trash):
                states[id] = state_of(id, None)
    reader.forget_others()
    found = [*states.values(), *fresh]
    return tuple(sorted(found, key=lambda s: (s.series, s.step is None, numbers_of(s.step), str(s.id or ""), s.path)))


def undecided(history: History, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return those of some checkpoints in place that `survey` calls PENDING or changed."""
    found = []
    for checkpoint in checkpoints:
        id = history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path)
        verdict = history.verdict(id or history.next_id(checkpoint.series, checkpoint.step))
        sealed = history.manifest(id) if id is not None else None
        if verdict is None or (sealed is not None and not looks_as_read(checkpoint.entries, sealed, verdict)):
            found.append(checkpoint)
    return found
