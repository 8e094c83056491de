"""A save of our own layout to a storage elsewhere: streamed while it is hashed, with no copy here and no rename there.

The objects are written under their final names, by whoever holds the claim of the path, and count once the manifest
is there. All of them are sent first and made visible together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckptguard.errors import BusyError, CkptguardError, StorageError
from ckptguard.layouts.own import LAYOUT, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, folder_name
from ckptguard.records.run import Run
from ckptguard.records.write_claims import RENEWED, Claim, claim_path, read_claim, release, renew
from ckptguard.runs.history import load_history
from ckptguard.storage.protocol import Upload
from ckptguard.training.content.safetensors_file import write_tensors
from ckptguard.training.content.training_parts import Captured
from ckptguard.training.saving.background_save import Abandoned, Gate
from ckptguard.training.saving.own_files import as_stored, is_sick, make_room
from ckptguard.training.saving.parallel import at_once
from ckptguard.upkeep.leftover_saves import collect_claim
from ckptguard.values.ids import series_of
from ckptguard.values.manifest import File, Manifest
from ckptguard.verify.seal import seal_written

_log = logging.getLogger("ckptguard")
_FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE)
_gates: dict[str, Gate] = {}  # of the claims that this process holds, by token


def write_elsewhere(
    run: Run,
    step: int,
    captured: Captured,
    text: bytes,
    gate: Gate,
    *,
    allow: Sequence[str],
    metrics: Mapping[str, float] | None,
) -> Manifest:
    """Write and seal the checkpoint of a step, as `write_checkpoint` does; BusyError if another writer is at it.
    Killed, it leaves a claim, by which the next look at the run finds what else it left."""
    name = folder_name(step)
    with _claimed(run, name, step, gate) as claim:
        alive = _SignsOfLife(run, claim, gate)
        try:
            gate.go_on()
            make_room(run, name)
            files = _write(run, name, captured, text, alive.go_on, allow)
            stored = tuple(as_stored(run, file) for file in files)
            gate.go_on()
            return seal_written(run, path=name, layout=LAYOUT.name, step=step, files=stored, metrics=metrics)
        except Exception:
            # Without its manifest it would never be good: leave nothing that looks like a checkpoint.
            _remove_own(run, claim)
            raise


def _write(
    run: Run, name: str, captured: Captured, text: bytes, go_on: Callable[[], None], allow: Sequence[str]
) -> list[File]:
    """Send all files at the same time, and then have them appear."""
    from blake3 import blake3

    parts = [(MODEL_FILE, captured.model, "model"), (OPTIMIZER_FILE, captured.others, "optimizer")]
    failed = False

    def go_on_together() -> None:
        go_on()
        if failed:
            raise Abandoned  # the other file failed

    def send(file: str, tensors: Mapping[str, Any], role: str, upload: Upload) -> File:
        nonlocal failed
        try:
            sick = is_sick("" if role == "model" else "optimizer.", allow)
            key = f"{name}/{file}"
            return write_tensors(_Appended(upload), tensors, key=key, role=role, go_on=go_on_together, sick=sick)
        except BaseException:
            failed = True
            raise

    with contextlib.ExitStack() as stack:
        uploads = []
        works = []
        for part in parts:
            if part[1] or part[0] == MODEL_FILE:
                upload = stack.enter_context(run.storage.upload(f"{name}/{part[0]}"))
                uploads.append(upload)
                works.append(functools.partial(send, *part, upload))
        try:
            files = at_once(works)
        finally:
            failed = True  # an interrupted caller waits for nobody
        state = stack.enter_context(run.storage.upload(f"{name}/{STATE_FILE}"))
        state.write(text)
        for upload in (*uploads, state):
            go_on()
            upload.commit()
    envelope = blake3(text).hexdigest()
    files.append(File(path=f"{name}/{STATE_FILE}", size=len(text), format="ckptguard_state", envelope=envelope))
    return sorted(files, key=lambda file: file.path)


class _Appended:
    """An upload as what `write_tensors` writes to."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def append(self, view: memoryview) -> None:
        self._upload.write(view)


class _SignsOfLife:
    """Says now and then that the writer lives, while it writes."""

    def __init__(self, run: Run, claim: Claim, gate: Gate) -> None:
        self._run, self._claim, self._gate = run, claim, gate
        self._due = time.monotonic() + RENEWED

    def go_on(self) -> None:
        self._gate.go_on()
        now = time.monotonic()
        if now >= self._due:
            self._due = now + RENEWED
            try:
                renew(self._run, self._claim)
            except StorageError as error:
                _log.debug("no sign of life could be given: %s", error)


@contextlib.contextmanager
def _claimed(run: Run, name: str, step: int, gate: Gate) -> Iterator[Claim]:
    claim = _claim(run, name, step)
    _gates[claim.token] = gate
    try:
        yield claim
    finally:
        del _gates[claim.token]
        with contextlib.suppress(StorageError):  # else it is collected once this process has ended
            if _is_ours(run, claim):
                release(run, claim)


def _claim(run: Run, name: str, step: int) -> Claim:
    series = series_of(name)

    def claim() -> Claim:
        generation = load_history(run).next_generation(series, step)
        return claim_path(run, path=name, series=series, step=step, generation=generation)

    try:
        return claim()
    except BusyError:
        other = read_claim(run, name)
        given_up = other is not None and other.token in _gates and _gates[other.token].abandoned
        if other is not None and not collect_claim(run, other, dead=given_up):
            raise
    return claim()


def _is_ours(run: Run, claim: Claim) -> bool:
    now = read_claim(run, claim.path)
    return now is not None and now.token == claim.token


def _remove_own(run: Run, claim: Claim) -> None:
    """Remove what this save wrote, unless it was given up for another one that writes there by now."""
    try:
        if _is_ours(run, claim):
            for file in _FILES:
                run.storage.remove(f"{claim.path}/{file}")
    except CkptguardError as error:
        _log.warning("what is left of %s could not be removed: %s", claim.path, error)
