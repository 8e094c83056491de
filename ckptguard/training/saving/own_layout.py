"""Our own layout on disk: a folder that appears whole under its name, and counts once its manifest is written."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckptguard.errors import ObjectMissingError, SettingsError, StateError
from ckptguard.keep.quarantine import mark_suspect, quarantine
from ckptguard.layouts.own import LAYOUT, MODEL_FILE, OPTIMIZER_FILE, folder_name
from ckptguard.records.run import Run
from ckptguard.runs.free_space import need_room
from ckptguard.runs.history import load_history
from ckptguard.storage.failures import translated
from ckptguard.storage.local.writes import shown_as_written
from ckptguard.storage.read_ahead import IN_FLIGHT, ReadAhead
from ckptguard.training.content.safetensors_file import fitting, read_file, write_file
from ckptguard.training.content.tagged_json import decode_state, encode_state, to_text
from ckptguard.training.content.tensor_bytes import stored_size
from ckptguard.training.content.training_parts import Captured, Parts
from ckptguard.training.saving.background_save import Abandoned, Gate
from ckptguard.training.saving.own_files import STATE_FORMAT, as_stored, is_sick, make_room, read_state, write_state
from ckptguard.training.saving.parallel import at_once
from ckptguard.training.saving.remote_save import write_elsewhere
from ckptguard.values.manifest import File, Manifest
from ckptguard.verify.seal import seal_written


def state_text(step: int, captured: Captured, extra: Mapping[str, Any]) -> bytes:
    """What is saved beside the tensors, as it is now; StateError if a part of it cannot be saved exactly."""
    state = {"ckptguard_state": STATE_FORMAT, "step": step, **captured.sections}
    return to_text(state | {key: encode_state(value, path=key) for key, value in extra.items()})


def write_checkpoint(
    run: Run,
    step: int,
    captured: Captured,
    text: bytes,
    gate: Gate | None = None,
    *,
    allow: Sequence[str] = (),
    metrics: Mapping[str, float] | None = None,
    wait_for_room: bool = False,
) -> Manifest:
    """Write and seal the checkpoint of a step, with its `state_text`; returns its manifest. Where too little space is
    free it is StorageFullError before anything is written, or `wait_for_room`.

    A name is never overwritten: what lies there is moved to quarantine first. To a storage elsewhere it is streamed,
    and BusyError says that another writer is at it. On any failure (StorageFullError: the disk is full) nothing is
    left under the final name, and no temporary folder either. NaN and infinity are not saved (SickTrainingError),
    except in masks and in tensors that `allow` matches. Once it is abandoned at the gate it raises Abandoned; where
    that comes too late the checkpoint is quarantined as SUSPECT.
    """
    gate = gate if gate is not None else Gate()
    size = len(text) + stored_size(captured.model) + stored_size(captured.others)
    need_room(
        run.storage, size, folder_name(step), wait=wait_for_room, go_on=gate.go_on, waits=gate.tell_whether_it_waits
    )
    if run.storage.root is None:
        manifest = write_elsewhere(run, step, captured, text, gate, allow=allow, metrics=metrics)
        _settle(run, manifest, gate)
        return manifest
    root = local_root(run)
    name = folder_name(step)
    temporary = f"tmp-{name}-{uuid.uuid4().hex[:8]}"
    folder = os.path.join(root, temporary)
    try:
        with translated(temporary, root):
            os.makedirs(folder)
        with shown_as_written(folder):
            files = _write_files(folder, name, captured, text, gate, allow)
            return seal_folder(run, step, temporary, files, gate, metrics)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def seal_folder(
    run: Run,
    step: int,
    temporary: str,
    files: Sequence[File],
    gate: Gate,
    metrics: Mapping[str, float] | None = None,
) -> Manifest:
    """Give a step's temporary folder its name and seal it with its metrics, and with files that are written under the
    keys that they will have. Failures leave nothing, and the gate means the same, as in `write_checkpoint`.
    """
    root, name = local_root(run), folder_name(step)
    folder = os.path.join(root, temporary)
    try:
        sync_folder(folder)
        own = os.stat(folder).st_ino
        gate.go_on()
        make_room(run, name)
        gate.go_on()
        run.storage.move(temporary, name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        stored = tuple(as_stored(run, file) for file in sorted(files, key=lambda f: f.path))
        gate.go_on()
        manifest = seal_written(run, path=name, layout=LAYOUT.name, step=step, files=stored, metrics=metrics)
    except Exception:
        # Without its manifest it would never be good: leave nothing that looks like a checkpoint. But if this save was
        # abandoned, a later one may lie there by now.
        with contextlib.suppress(OSError):
            if os.stat(os.path.join(root, name)).st_ino == own:
                run.storage.remove(name)
        raise
    _settle(run, manifest, gate)
    return manifest


def read_checkpoint(
    run: Run, manifest: Manifest, parts: Parts, *, allow: Sequence[str] = ()
) -> tuple[dict[str, Any], str | None]:
    """Load a sealed checkpoint that lies in place into `parts`; every byte is hashed on the way.

    Returns what else was saved (rng, data, ...), and what is wrong with the bytes: then model and optimizer may be
    half loaded. NaN and infinity are wrong too, except in masks and in tensors that `allow` matches. StateError if
    the checkpoint does not fit.
    """
    state, wrong = read_state(run, manifest)
    if wrong is not None:
        return {}, wrong
    model, wrong = _read_tensors(run, manifest, MODEL_FILE, parts.model_tensors(), sick=is_sick("", allow))
    if wrong is not None:
        return {}, wrong
    others: dict[str, Any] = {}
    if manifest.file(f"{manifest.path}/{OPTIMIZER_FILE}") is not None:
        sick = is_sick("optimizer.", allow)
        others, wrong = _read_tensors(run, manifest, OPTIMIZER_FILE, parts.other_tensors(), sick=sick, strict=False)
        if wrong is not None:
            return {}, wrong
    parts.restore(state, model, others)
    taken = {"ckptguard_state", "step", "model", "optimizer", "scheduler", "scaler"}
    return {key: decode_state(value) for key, value in state.items() if key not in taken}, None


def local_root(run: Run) -> str:
    """The run's local folder; SettingsError for a run on another storage."""
    if run.storage.root is None:
        raise SettingsError(
            f"several ranks save their own shards into a local folder, and {run.url} is none",
            hint="name a folder that all ranks share, or pass your own save= and load=",
        )
    return run.storage.root


def _write_files(
    folder: str, name: str, captured: Captured, text: bytes, gate: Gate, allow: Sequence[str]
) -> list[File]:
    """All files, written at the same time: where it takes long to make one durable, all wait at once."""
    parts = [(MODEL_FILE, captured.model, "model"), (OPTIMIZER_FILE, captured.others, "optimizer")]
    stop = threading.Event()

    def go_on() -> None:
        gate.go_on()
        if stop.is_set():
            raise Abandoned  # the other file failed

    def write(file: str, tensors: Mapping[str, Any], role: str) -> File:
        try:
            with translated(f"{name}/{file}", folder):
                descriptor = os.open(
                    os.path.join(folder, file), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
                )
            try:
                key, sick = f"{name}/{file}", is_sick("" if role == "model" else "optimizer.", allow)
                return write_file(descriptor, tensors, key=key, where=folder, role=role, go_on=go_on, sick=sick)
            finally:
                os.close(descriptor)
        except BaseException:
            stop.set()
            raise

    works = [functools.partial(write, *part) for part in parts if part[1] or part[0] == MODEL_FILE]
    try:
        return at_once([*works, functools.partial(write_state, folder, name, text)])
    finally:
        stop.set()  # an interrupted caller waits for nobody


def _settle(run: Run, manifest: Manifest, gate: Gate) -> None:
    """A save is sealed. If it had been abandoned before, training went back before it: it must never be chosen."""
    if gate.end():
        return
    reason = "the save was abandoned before it was sealed"
    key = (manifest.step, manifest.generation)
    history = load_history(run)
    if history.current(manifest.series, manifest.step, manifest.path) == key:
        with contextlib.suppress(ObjectMissingError):
            quarantine(run, manifest.path, reason=reason)
            raise Abandoned
    mark_suspect(run, history, manifest.series, key, reason)
    raise Abandoned


def sync_folder(folder: str) -> None:
    """Have the names in a folder on the disk."""
    with translated("", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_tensors(
    run: Run,
    manifest: Manifest,
    file: str,
    into: Mapping[str, Any],
    *,
    sick: Callable[[str, Any], bool],
    strict: bool = True,
) -> tuple[dict[str, Any], str | None]:
    """Not `strict`: a tensor that is there and does not fit is no error, it is made anew."""
    sealed = manifest.file(f"{manifest.path}/{file}")
    if sealed is None:
        raise StateError(f"the manifest of {manifest.path} names no {file}")
    try:
        with run.storage.open(sealed.path) as reader:
            wanted = into if strict else fitting(sealed, into)
            if run.storage.root is not None:
                return read_file(reader, sealed, wanted, sick=sick)
            with ThreadPoolExecutor(IN_FLIGHT) as requests, ReadAhead(reader, requests) as ahead:
                return read_file(ahead, sealed, wanted, sick=sick, threads=1)
    except ObjectMissingError:
        return {}, f"{sealed.path} is not there"
