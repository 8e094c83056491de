"""Going back: which checkpoint, verified, loaded. Damage found on the way is recorded, and the next older one taken.

What is loaded is pinned until every rank has it: a store's `read` returns only then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ckptguard.errors import BusyError, CouldNotTellError, NoKnownGoodError, RecordsError
from ckptguard.layouts import Checkpoint
from ckptguard.records.clock import utc_now
from ckptguard.records.manifests import read_manifest
from ckptguard.records.pins import InUse
from ckptguard.records.run import Run
from ckptguard.recover.roll_back import roll_back, verify_pending
from ckptguard.runs.find_known_good import Candidate, known_good_candidates
from ckptguard.runs.history import load_history
from ckptguard.runs.listing import find_checkpoint, list_checkpoints
from ckptguard.training.saving.stores import Extra, Store
from ckptguard.training.state.check_state_json import wrong_with
from ckptguard.values.ids import MAX_STEP, parse_id
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verify.checkpoint import verify_checkpoint
from ckptguard.version import __version__

_log = logging.getLogger("ckptguard")
_LOCK_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that is loaded now. `extra` is what was saved beside it (empty: unknown)."""

    step: int
    id: str
    path: str
    extra: Extra


def load_newest_good(run: Run, settings: Settings, store: Store, *, refused: Iterable[str] = ()) -> Loaded | None:
    """Load the newest known-good checkpoint for a resume; None if there is nothing that training finished
    after its beginning.

    Checkpoints without a verdict are verified first, newest first; where none can be written (a full disk), what is
    GOOD as it is read now is taken. Newer ones that are not good stay where they are. Ids in `refused` do not count.
    NoKnownGoodError if there are checkpoints and none could be loaded.
    """
    refused = set(refused)
    damaged: set[str] = set()
    with InUse(run, "a resume") as in_use:
        while True:
            left = verify_pending(run, settings, series=store.series, exclude=refused)
            found = known_good_candidates(run, load_history(run), series=store.series, exclude=refused, most=1)
            if not found:
                if refused:
                    raise NoKnownGoodError(f"no checkpoint of {run.url} could be loaded: {', '.join(sorted(refused))}")
                break
            loaded = _use(run, settings, store, found[0], in_use)
            if loaded is not None:
                return loaded
            checkpoint_id = found[0].answer.id
            if found[0].in_place and checkpoint_id not in damaged:
                damaged.add(checkpoint_id)  # its kept copy may still be whole
            else:
                refused.add(checkpoint_id)
    loaded = load_unrecorded(run, settings, store, before_step=MAX_STEP + 1) if left else None
    if loaded is None and _holds_finished(run, store.series):
        raise NoKnownGoodError(
            f"{run.url} holds checkpoints, and none of them is good",
            hint=f"see: ckptguard verify {run.url}; to begin anew, move them away or use another run",
        )
    return loaded


def _holds_finished(run: Run, series: str) -> bool:
    """Whether there are checkpoints beyond the beginning, other than ones whose writing did not end."""
    history = load_history(run)
    for checkpoint in list_checkpoints(run):
        if checkpoint.series == series and checkpoint.step:
            key = history.current_if_readable(series, checkpoint.step, checkpoint.path)
            verdict = history.verdict(series, key) if key is not None else None
            if verdict is not None and verdict.outcome is not Outcome.INCOMPLETE:
                return True
    return False


def go_back(run: Run, settings: Settings, store: Store, *, before_step: int, reason: str) -> Loaded:
    """Roll the run back and load the known-good: newer checkpoints are quarantined. NoKnownGoodError if nothing good
    is left."""
    read_back = not store.hashes_on_load
    with InUse(run, "a rollback") as in_use:
        while True:
            loaded, tried = _roll_back_and_read(
                run, settings, store, in_use, before_step=before_step, to_id=None, reason=reason, read_back=read_back
            )
            if loaded is not None:
                return loaded
            if read_back:
                before_step = tried
            read_back = True  # it is not what its verdict says: a copy of it that is may still be there


def newest_good_step(run: Run, settings: Settings, store: Store, *, before_step: int) -> int | None:
    """The step of the newest known-good before a step, after what is pending was verified."""
    verify_pending(run, settings, before_step=before_step, series=store.series)
    found = known_good_candidates(run, load_history(run), before_step=before_step, series=store.series, most=1)
    return found[0].key[0] if found else None


def load_unrecorded(run: Run, settings: Settings, store: Store, *, before_step: int) -> Loaded | None:
    """Load the newest checkpoint before a step that is GOOD as it is read now, for where no verdict can be written (a
    full disk). Newer ones stay where they are. None if there is none."""
    found = [c for c in list_checkpoints(run) if c.series == store.series and (c.step or 0) < before_step]
    for checkpoint in sorted((c for c in found if c.step is not None), key=lambda c: -(c.step or 0)):
        try:
            checked = verify_checkpoint(run, checkpoint, settings, md5=False, record=False)
            if checked.outcome is Outcome.GOOD:
                parsed = parse_id(checked.id or "")
                sealed = read_manifest(run, store.series, *parsed) if parsed is not None else None
                with InUse(run, "a rollback") as in_use:
                    loaded = _load(run, settings, store, in_use, sealed or _unsealed(run, checkpoint))
                if loaded is not None:
                    return loaded
        except CouldNotTellError as error:
            _log.warning("%s could not be used: %s", checkpoint.path, error.message)
    return None


def _use(run: Run, settings: Settings, store: Store, candidate: Candidate, in_use: InUse) -> Loaded | None:
    """Verify and load one candidate; one that lies only in a kept copy is put back first."""
    answer = candidate.answer
    in_use.pin(answer.series, candidate.key)
    try:
        if not candidate.in_place:
            loaded, _ = _roll_back_and_read(
                run, settings, store, in_use, before_step=None, to_id=answer.id, reason="put back for a resume"
            )
            return loaded
        checkpoint = find_checkpoint(run, candidate.manifest.path)
        if checkpoint is None:
            return None
        if not store.hashes_on_load:
            checked = verify_checkpoint(run, checkpoint, settings, md5=False)
            if checked.outcome is not Outcome.GOOD or checked.id != answer.id:
                _log.warning("%s is %s now; looking for an older one", checkpoint.path, checked.outcome.value)
                return None
        return _read(run, settings, store, in_use, candidate.manifest.path, answer.id)
    except (CouldNotTellError, NoKnownGoodError) as error:
        _log.warning("%s could not be used: %s", answer.path, error.message)
        return None


def _roll_back_and_read(
    run: Run,
    settings: Settings,
    store: Store,
    in_use: InUse,
    *,
    before_step: int | None,
    to_id: str | None,
    reason: str,
    read_back: bool = True,
) -> tuple[Loaded | None, int]:
    for attempt in range(_LOCK_TRIES):
        try:
            rolled = roll_back(
                run,
                settings,
                reason=reason,
                before_step=before_step,
                to_id=to_id,
                series=store.series,
                check_writing=False,
                read_back=read_back,
                in_use=in_use,
            )
            break
        except BusyError:
            if attempt == _LOCK_TRIES - 1:
                raise
    path = rolled.known_good.path.removeprefix(run.url.rstrip("/") + "/")
    return _read(run, settings, store, in_use, path, rolled.known_good.id), rolled.known_good.step or 0


def _read(run: Run, settings: Settings, store: Store, in_use: InUse, path: str, checkpoint_id: str) -> Loaded | None:
    parsed = parse_id(checkpoint_id)
    manifest = read_manifest(run, store.series, *parsed) if parsed is not None else None
    if manifest is None or manifest.step is None:
        raise RecordsError(f"the manifest of {path} ({checkpoint_id}) is gone")
    return _load(run, settings, store, in_use, manifest)


def _load(run: Run, settings: Settings, store: Store, in_use: InUse, manifest: Manifest) -> Loaded | None:
    in_use.pin(store.series, (manifest.step, manifest.generation))
    extra, wrong = store.read(manifest)
    if wrong is None:
        why = wrong_with(extra)
        wrong = f"what was saved beside {manifest.path} cannot be put back: {why}" if why is not None else None
    if wrong is None:
        return Loaded(step=manifest.step or 0, id=manifest.id, path=run.usable(manifest.path), extra=extra)
    _log.warning("%s; looking for an older checkpoint", wrong)
    checkpoint = find_checkpoint(run, manifest.path)
    if checkpoint is not None:
        verify_checkpoint(run, checkpoint, settings, md5=False)
    return None


def _unsealed(run: Run, checkpoint: Checkpoint) -> Manifest:
    """What stands for the manifest of the user's own files where none can be written: it names the next generation."""
    return Manifest(
        series=checkpoint.series,
        path=checkpoint.path,
        layout=checkpoint.layout,
        step=checkpoint.step,
        generation=load_history(run).next_generation(checkpoint.series, checkpoint.step),
        digest_origin="observer",
        sealed_at=utc_now(),
        version=__version__,
        nonce="",
        files=(),
    )
