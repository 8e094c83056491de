"""Roll back or resume: choose a checkpoint, verify it, load it.

Damage found is recorded, and the next older checkpoint is used. The same happens if a resume's probe refuses one. A
loaded checkpoint stays pinned until every rank has it: a store's `read` returns only then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import msgspec

from ckptguard.decisions.health import cause_of_error
from ckptguard.errors import (
    BusyError,
    CkptguardError,
    CouldNotTellError,
    NoKnownGoodError,
    RecordsError,
    SettingsError,
    StateError,
)
from ckptguard.keep.quarantine import quarantine
from ckptguard.records.manifests import read_manifest
from ckptguard.records.pins import InUse
from ckptguard.recover.roll_back import GoBack, RolledBack, roll_back
from ckptguard.recover.verify_pending import verify_pending
from ckptguard.runs.candidates import first_whole
from ckptguard.runs.find_known_good import Candidate, Wanted, newest_candidate
from ckptguard.runs.run_view import RunView
from ckptguard.training.content.safetensors_file import NotAsSealed
from ckptguard.training.ranks import Ranks, together
from ckptguard.training.rollback.incident_log import begin_incident, end_incident
from ckptguard.training.saving.stores import Loaded, LoadingStore
from ckptguard.training.signals.weights import first_of
from ckptguard.training.state.progress import wrong_with
from ckptguard.training.state.rng import capture_rng, restore_rng
from ckptguard.values.ids import MAX_STEP, CheckpointId, single_number, step_text
from ckptguard.values.manifest import Manifest
from ckptguard.values.own_log import log as _log
from ckptguard.values.verdict import SEAL_OF_WRITER, Outcome, Severity
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.verification.collect_evidence import manifest_without_seal

Probe = Callable[[], Any]
_LOCK_TRIES = 3
_MOST_NAMED = 3
_QUICKLY = Verification(md5=False)
_READ_ONLY = Verification(md5=False, record=False)


def load_newest_good(
    view: RunView, store: LoadingStore, *, refused: Iterable[CheckpointId] = (), thinned: bool = False
) -> Loaded | None:
    """Load the newest known-good checkpoint for a resume. None if training finished nothing after its beginning. With
    `thinned` that is one without the optimizer, if no other one is good.

    Checkpoints without a verdict are verified first, newest first. If no verdict can be written (full disk), one that
    reads as GOOD now is used. Newer ones that are not good stay in place. Ids in `refused` do not count.

    Raises:
        NoKnownGoodError: there are checkpoints, but none could be loaded.
        CouldNotTellError: one that may be good could not be read.
    """
    wanted = Wanted(series=store.series, exclude=frozenset(refused), thinned=thinned)
    failed = wanted.exclude
    with InUse(view.run, "a resume") as in_use:
        left = verify_pending(view, wanted)

        def verify_more(exclude: frozenset[CheckpointId]) -> None:
            nonlocal failed, left
            failed, left = exclude, verify_pending(view, msgspec.structs.replace(wanted, exclude=exclude))

        try:
            found = first_whole(
                view, lambda candidate: _use(view, store, candidate, in_use), wanted, when_refused=verify_more
            ).result
            passed = ""
            with contextlib.suppress(CkptguardError):  # it is loaded, whatever cannot be said of the others
                passed = _not_used(view, store.series, found)
            return dataclasses.replace(found, remark="; ".join(filter(None, (found.remark, passed))))
        except NoKnownGoodError as error:
            if failed:
                ids = sorted(failed, key=lambda id: id.order)
                names = ", ".join(f"{step_text(id.step)}{id.nth_save}" for id in ids)
                raise _none_is_good(view, f": of {store.series} {names} could not be loaded") from error
    read = _read_unrecorded(view, store, before_step=MAX_STEP + 1, thinned=thinned) if left else None
    if isinstance(read, CouldNotTellError):
        raise read  # it may be good: training must not begin again over it
    if read is None and (_holds_finished(view, store.series) or _holds_weights(view, store.series)):
        raise _none_is_good(view, "")
    return read


def _not_used(view: RunView, series: str, loaded: Loaded) -> str:
    """Name the newer checkpoints that were passed over, with their outcomes."""
    own = ((single_number(c.step), c) for c in view.checkpoints if c.series == series)
    newer = [(step, c.path, c) for step, c in own if step is not None and step > (loaded.id.number or 0)]
    said = []
    for _, _, checkpoint in sorted(newer, key=lambda one: one[:2]):
        id = view.current_if_readable(checkpoint) or view.history.next_id(series, checkpoint.step)
        verdict = view.history.verdict(id)
        said.append(f"{checkpoint.path} is {verdict.outcome.value if verdict is not None else 'not verified'}")
    more = f" and {len(said) - _MOST_NAMED} more were not used" if len(said) > _MOST_NAMED else ""
    return ", ".join(said[-_MOST_NAMED:]) + more


def _none_is_good(view: RunView, why: str) -> NoKnownGoodError:
    place = shlex.quote(view.run.url)
    weights = newest_candidate(view, Wanted(thinned=True))
    if weights is not None and weights.answer.thinned:
        return NoKnownGoodError(
            f"{view.run.url} has no good checkpoint with its {', '.join(weights.answer.thinned)}{why}",
            hint=f"{weights.manifest.path} is good and holds weights: a guard with strict=False resumes from these",
        )
    return NoKnownGoodError(
        f"{view.run.url} holds checkpoints, but none of them is good{why}",
        hint=f"ckptguard verify {place} says what to do; to start from scratch, move them away or use another run",
    )


def go_back(view: RunView, store: LoadingStore, *, before_step: int, reason: str) -> Loaded:
    """Roll the run back and load the known-good checkpoint. Newer ones are quarantined. Raises NoKnownGoodError."""
    read_back = not store.hashes_on_load
    with InUse(view.run, "a rollback") as in_use:
        while True:
            back = GoBack(
                reason=reason, before_step=before_step, series=store.series, check_writing=False, read_back=read_back
            )
            rolled = _roll_back(view, back, in_use)
            loaded = _put_back(view, store, rolled, in_use)
            if isinstance(loaded, Loaded):
                return loaded
            if read_back:
                before_step = rolled.known_good.id.number or 0
            read_back = True  # it differs from its verdict, but a whole copy may exist


def newest_good_step(view: RunView, store: LoadingStore, *, before_step: int) -> int | None:
    """Return the step of the newest known-good checkpoint before a step, after pending ones were verified."""
    wanted = Wanted(before_step=before_step, series=store.series)
    verify_pending(view, wanted)
    found = newest_candidate(view, wanted)
    return found.id.number if found is not None else None


def load_unrecorded(view: RunView, store: LoadingStore, *, before_step: int) -> Loaded | None:
    """Load the newest checkpoint before a step that reads as GOOD now, for a full disk. None if there is none.

    Newer ones stay in place.
    """
    read = _read_unrecorded(view, store, before_step=before_step, thinned=False)
    return read if isinstance(read, Loaded) else None


def _read_unrecorded(
    view: RunView, store: LoadingStore, *, before_step: int, thinned: bool
) -> Loaded | CouldNotTellError | None:
    """Do the same. If none is loaded, return why the newest one after the beginning that may be good is not."""
    unsure: CouldNotTellError | None = None
    own = ((single_number(c.step), c) for c in view.checkpoints if c.series == store.series)
    found = [(step, c) for step, c in own if step is not None and step < before_step]
    for step, checkpoint in sorted(found, key=lambda pair: -pair[0]):
        try:
            checked = verify_checkpoint(view, checkpoint, _READ_ONLY)
            if checked.outcome is not Outcome.GOOD:
                continue
            sealed = read_manifest(view.run, checked.id) if checked.id is not None else None
            if sealed is not None and sealed.thinned and not thinned:
                continue
            with InUse(view.run, "a rollback") as in_use:
                # Where none can be written, user files have no manifest: this one names the next generation.
                generation = view.history.next_id(store.series, checkpoint.step).generation
                sealed = sealed or manifest_without_seal(checkpoint, generation=generation)
                loaded = _load(view, store, sealed, in_use)
            if isinstance(loaded, Loaded):
                return loaded
        except CouldNotTellError as error:
            _log.warning("%s could not be used: %s", checkpoint.path, error.message)
            unsure = unsure or (error if step else None)
    return unsure


def _holds_finished(view: RunView, series: str) -> bool:
    """True if there are finished checkpoints after the beginning. Where no save of the series is on record, one that is
    whole may have lost its records: training must not begin again over it."""
    view.forget()
    lost = not view.history.sealed(series)
    for checkpoint in [c for c in view.checkpoints if c.series == series and c.step]:
        id = view.current_if_readable(checkpoint)
        verdict = view.history.verdict(id or view.new_id(checkpoint))
        if verdict is None:
            continue
        errors = {finding.expected for finding in verdict.findings if finding.severity is Severity.ERROR}
        if (id is not None and verdict.outcome is not Outcome.INCOMPLETE) or (lost and errors == {SEAL_OF_WRITER}):
            return True
    return False


def _holds_weights(view: RunView, series: str) -> bool:
    """True if weights are good, in place or as a copy: training must not begin again over them without a word."""
    return newest_candidate(view, Wanted(series=series, thinned=True)) is not None


def _use(view: RunView, store: LoadingStore, candidate: Candidate, in_use: InUse) -> Loaded | str:
    """Verify and load one candidate. A kept copy is put back first."""
    id, path = candidate.id, candidate.manifest.path
    in_use.pin(id)
    try:
        if not candidate.in_place:
            back = GoBack(
                reason="put back for a resume",
                to_id=id,
                series=store.series,
                check_writing=False,
                thinned=bool(candidate.answer.thinned),
            )
            return _put_back(view, store, _roll_back(view, back, in_use), in_use)
        if not store.hashes_on_load:
            checkpoint = view.look_again(path)
            if checkpoint is None:
                return f"{path} is gone"
            checked = verify_checkpoint(view, checkpoint, _QUICKLY)
            if checked.outcome is not Outcome.GOOD or checked.id != id:
                _log.warning("%s is %s now; looking for an older one", path, checked.outcome.value)
                return f"{path} is {checked.outcome.value} now"
        return _read(view, store, id, in_use)
    except (CouldNotTellError, NoKnownGoodError) as error:
        _log.warning("%s could not be used: %s", candidate.answer.path, error.message)
        if isinstance(error, CouldNotTellError):
            raise
        return error.message


def _roll_back(view: RunView, back: GoBack, in_use: InUse) -> RolledBack:
    for _ in range(_LOCK_TRIES - 1):
        with contextlib.suppress(BusyError):
            return roll_back(view, back, in_use=in_use)
    return roll_back(view, back, in_use=in_use)


def _put_back(view: RunView, store: LoadingStore, rolled: RolledBack, in_use: InUse) -> Loaded | str:
    """Load what a rollback went back to."""
    loaded = _read(view, store, rolled.known_good.id, in_use)
    return dataclasses.replace(loaded, remark=rolled.copied) if isinstance(loaded, Loaded) else loaded


def _read(view: RunView, store: LoadingStore, id: CheckpointId, in_use: InUse) -> Loaded | str:
    manifest = read_manifest(view.run, id)
    if manifest is None or manifest.step is None:
        raise RecordsError(f"the manifest of {id} of {id.series} is gone")
    return _load(view, store, manifest, in_use)


def _load(view: RunView, store: LoadingStore, manifest: Manifest, in_use: InUse) -> Loaded | str:
    """Load a checkpoint, or return what is wrong with it. Then it was verified again."""
    in_use.pin(manifest.id)
    try:
        extra = store.read(manifest)
        why = wrong_with(extra)
        if why is None:
            step, path = manifest.training_step or 0, view.run.usable(manifest.path)
            saved_at = None if manifest.saved_at is None else manifest.saved_at / 1e9
            return Loaded(step=step, id=manifest.id, path=path, extra=extra, saved_at=saved_at)
        wrong = f"what was saved beside {manifest.path} cannot be restored: {why}"
    except NotAsSealed as error:
        wrong = error.message
    _log.warning("%s; looking for an older checkpoint", wrong)
    checkpoint = view.look_again(manifest.path)
    if checkpoint is not None:
        verify_checkpoint(view, checkpoint, _QUICKLY)
    return wrong


def newest(
    view: RunView, store: LoadingStore, refused: Collection[CheckpointId], *, thinned: bool = False
) -> Loaded | None:
    """Load the newest checkpoint of the run. A lost one is copied back from a replica. `thinned` is as for
    `load_newest_good`."""
    view.forget()  # a probe may have taken long
    if view.settings.replicas and not refused:
        from ckptguard.replicas.start_run import regain  # only runs with replicas need it

        verify_pending(view, Wanted(series=store.series))
        back = regain(view, series=store.series)
        if back is not None:
            view.forget()
            loaded = load_newest_good(view, store, refused=refused, thinned=thinned)
            lost = f"{view.run.url} had lost its newest good checkpoint; {back.path} was copied back from {back.source}"
            return loaded and dataclasses.replace(loaded, remark="; ".join(filter(None, (lost, loaded.remark))))
    return load_newest_good(view, store, refused=refused, thinned=thinned)


def put_aside(view: RunView, found: Loaded, why: str) -> None:
    """Quarantine a checkpoint that a probe refused, with an incident."""
    reason = f"a checked resume refused it: {why}"
    evidence: dict[str, object] = {"checkpoint": str(found.id)}
    incident = begin_incident(view.run, step=found.step, cause="probe", reason=reason, evidence=evidence)
    action = "quarantined; using an older checkpoint with which the same batch is finite"
    try:
        quarantine(view, found.path.removeprefix(view.run.url.rstrip("/") + "/"), reason=reason)
    except CkptguardError as error:
        action = f"using an older checkpoint; this one could not be quarantined: {error.message}"
        _log.warning("%s could not be quarantined: %s", found.path, error.message)
    end_incident(view.run, incident, action=action)


def refused_by(probe: Probe, model: Any, ranks: Ranks) -> str | None:
    """Run the probe on every rank. Returns why the first one that minds refuses the loaded model, or None."""
    model = getattr(model, "module", model)
    if ranks.size == 1:
        return sick_because(model, probe)  # its own exceptions are the caller's
    answers = together(ranks, "the probe", functools.partial(sick_because, model, probe))
    return next((f"rank {rank}: {why}" for rank, why in enumerate(answers) if why), None)


def sick_because(model: Any, probe: Probe) -> str | None:
    """Run `probe`, which computes the loss of a small batch and may call backward. Returns what is not finite, or None.

    The model was just loaded. Gradients, buffers, training mode and random numbers are restored afterwards. Exceptions
    of the probe that do not report a sickness are raised.

    Raises:
        SettingsError: it gives neither a loss nor gradients.
        StateError: it changed a parameter. The model must be loaded again.
    """
    parameters = dict(model.named_parameters()) if hasattr(model, "named_parameters") else {}
    before = {name: parameter._version for name, parameter in parameters.items()}
    with _undone(model, parameters):
        try:
            found = _judge(parameters, probe())
        except Exception as error:
            if cause_of_error(f"{type(error).__name__}: {error}") is None:
                raise
            found = f"the probe raised: {error}"
    for name, parameter in parameters.items():
        if parameter._version != before[name]:
            raise StateError(f"the probe changed {name}", hint="it must compute a loss, and not update the model")
    return found


def _judge(parameters: dict[str, Any], loss: Any) -> str | None:
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    has_gradients = any(parameter.grad is not None for parameter in parameters.values())
    if getattr(loss, "requires_grad", False) and not has_gradients:
        loss.sum().backward()
    gradients = [(name, p.grad) for name, p in parameters.items() if p.grad is not None]
    if loss is None and not gradients:
        raise SettingsError("the probe gave neither a loss nor gradients", hint="return the loss of a small batch")
    if loss is not None:
        number = float(loss.detach().sum() if hasattr(loss, "detach") else loss)
        if not math.isfinite(number):
            return f"the loss of the probe is {number}"
    bad = first_of([(name, g.to_local() if hasattr(g, "to_local") else g) for name, g in gradients if g.numel()])
    return f"the gradient of {bad} is not finite in the probe" if bad is not None else None


@contextlib.contextmanager
def _undone(model: Any, parameters: dict[str, Any]) -> Iterator[None]:
    import torch

    modules = list(model.modules()) if hasattr(model, "modules") else []
    modes = [module.training for module in modules]
    buffers = [(m, n, b, b.detach().clone()) for m in modules for n, b in m.named_buffers(recurse=False)]
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    generators = capture_rng()
    for parameter in parameters.values():
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                buffer.copy_(content)
                setattr(module, name, buffer)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        restore_rng(generators)
