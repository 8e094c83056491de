"""Survey: what is known about every checkpoint of a run, without reading its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ckptguard.decisions.known_good import finest_counter
from ckptguard.keep.room import own_bytes
from ckptguard.layouts import Checkpoint
from ckptguard.records.kept import KeptCopy, list_kept, read_kept
from ckptguard.records.run import Run
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
    - `kept_bytes`: the space that its kept copy needs alone; None without a copy, or if unknown (some reflinks).
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
    thinned: bool = False  # what only a resume needs was taken from it
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
    known = _Known(run, reader, frozenset(list_kept(run)), frozenset(list_trashed(run)), pins_of(run))
    states: dict[CheckpointId, CheckpointState] = {}
    fresh: list[CheckpointState] = []
    for checkpoint in view.checkpoints:
        id = history.current_if_readable(
            checkpoint.series, checkpoint.step, checkpoint.path, path_of=reader.sealed_path
        )
        own = id or history.next_id(checkpoint.series, checkpoint.step)
        if id is not None or history.has_verdict(own):
            states[own] = known.state(own, checkpoint)
        else:
            fresh.append(msgspec.structs.replace(known.state(own, checkpoint), id=None))
    recorded = (id for series in history.names for id in history.current_verdicts(series))
    states |= {id: known.state(id) for id in recorded if id not in states and known.has(id)}
    reader.forget_others()
    found = [*states.values(), *fresh]
    return tuple(sorted(found, key=_in_order))


def _in_order(state: CheckpointState) -> tuple[object, ...]:
    """Series by name, their steps and generations by number: ``.10`` comes after ``.2``."""
    generation = 0 if state.id is None else state.id.generation
    return state.series, state.step is None, numbers_of(state.step), generation, state.path


class _Known(NamedTuple):
    """What the records of a run say."""

    run: Run
    reader: RunReader
    kept: frozenset[CheckpointId]
    trashed: frozenset[CheckpointId]
    pins: Mapping[CheckpointId, Sequence[str]]

    def has(self, id: CheckpointId) -> bool:
        """True if more than its name is known of a generation."""
        return bool(self.reader.judged(id) or self.reader.sealed(id)) or id in self.kept or id in self.trashed

    def state(self, id: CheckpointId, checkpoint: Checkpoint | None = None) -> CheckpointState:
        """Return what is known about a generation, whose content is in this checkpoint if there is one."""
        verdict, sealed, copy = self.reader.judged(id), self.reader.sealed(id), self._copy(id)
        lies = checkpoint or sealed  # both have path, layout and size
        outcome, reason = (verdict.outcome, verdict.reason) if verdict else (Outcome.PENDING, "")
        if verdict and verdict.place_damaged and verdict.content and checkpoint is None and copy is not None:
            outcome, reason = verdict.content, ""  # the damage was to the file in place, which is gone
        unread = checkpoint.unread if checkpoint is not None else None
        if unread is not None:
            outcome, reason = Outcome.PENDING, f"it could not be read: {unread}"
        return CheckpointState(
            path=lies.path if lies else id.series,
            series=id.series,
            layout=lies.layout if lies else "",
            step=id.step,
            id=id,
            outcome=outcome,
            changed=checkpoint is not None and unread is None and self.reader.has_changed(id, checkpoint.entries),
            in_place=checkpoint is not None,
            kept=copy is not None,
            kept_how=copy.how if copy else None,
            quarantined=self.reader.history.is_quarantined(id),
            trashed=id in self.trashed,
            verified_at=verdict.checked_at if verdict else None,
            bytes=lies.bytes if lies else None,
            kept_bytes=own_bytes(self.run, copy) if copy else None,
            pins=tuple(self.pins.get(id, ())),
            reason=reason,
            thinned=sealed is not None and bool(sealed.thinned),
            counter=finest_counter(sealed.series_head.counters) if sealed else None,
        )

    def _copy(self, id: CheckpointId) -> KeptCopy | None:
        """Return the kept copy of a generation. A hard link that shares changes to the original is none."""
        copy = read_kept(self.run, id) if id in self.kept else None
        files = self.reader.sealed(id, files=True) if copy is not None else None
        return copy if copy is None or files is None or kept_matches(self.run, copy, files) else None


def undecided(history: History, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return those of some checkpoints in place that `survey` calls PENDING or changed."""
    found = []
    for checkpoint in checkpoints:
        id = history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path)
        verdict = history.verdict(id or history.next_id(checkpoint.series, checkpoint.step))
        sealed = history.manifest(id) if id is not None else None
        if (
            verdict is None
            or checkpoint.unread
            or (sealed is not None and not looks_as_read(checkpoint.entries, sealed, verdict))
        ):
            found.append(checkpoint)
    return found
