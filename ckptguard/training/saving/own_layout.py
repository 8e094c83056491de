"""Our own layout: hashed while it is written whole, compared with those digests when it is loaded."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptguard.errors import ObjectMissingError, StateError
from ckptguard.layouts.own import MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, folder_name
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.storage.protocol import Reader
from ckptguard.storage.read_ahead import IN_FLIGHT, ReadAhead
from ckptguard.training.content.safetensors_file import NotAsSealed, fitting, read_file, write_tensors
from ckptguard.training.content.tagged_json import decode_state, encode_state, from_text, to_text
from ckptguard.training.content.tensor_bytes import stored_size
from ckptguard.training.content.training_parts import Captured, TrainingParts
from ckptguard.training.saving.destinations import Destination, SaveAbandoned, SaveTurn, destination, room_for, settle
from ckptguard.training.signals.weights import first_of
from ckptguard.values.manifest import File, Manifest

STATE_FORMAT = 1
_TAKEN = {"ckptguard_state", "step", "model", "optimizer", "scheduler", "scaler"}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything saved for one step: its tensors, the `text` of its other state, and its metrics."""

    step: int
    captured: Captured
    text: bytes
    metrics: Mapping[str, float] | None


def snapshot_of(step: int, captured: Captured, extra: Mapping[str, Any]) -> Snapshot:
    """Return what to save now, with `extra`. Raises StateError if a part cannot be saved exactly."""
    state = {"ckptguard_state": STATE_FORMAT, "step": step, **captured.sections}
    text = to_text(state | {key: encode_state(value, path=key) for key, value in extra.items()})
    return Snapshot(step=step, captured=captured, text=text, metrics=extra.get("metrics"))


def write_checkpoint(view: RunView, snapshot: Snapshot, turn: SaveTurn) -> None:
    """Write and seal a checkpoint.

    With too little free space it raises StorageFullError before it writes, or waits, depending on the settings. A name
    is never overwritten: existing files are quarantined first. NaN and infinity are not saved, except in masks and in
    tensors that the settings allow. After any failure nothing is left under the final name, and no temporary folder.

    Raises:
        BusyError: another writer is using the path on a remote storage.
        StorageFullError: the disk is full.
        SickTrainingError: a tensor holds NaN or infinity.
        SaveAbandoned: it was abandoned. If that came too late, the checkpoint is quarantined as SUSPECT.
    """
    captured, settings = snapshot.captured, view.settings
    room_for(
        view,
        len(snapshot.text) + stored_size(captured.model) + stored_size(captured.others),
        folder_name(snapshot.step),
        wait=settings.on_full == "wait",
        check_stop=turn.check_stop,
        waits=turn.tell_whether_it_waits,
    )
    with destination(view, snapshot.step, turn) as place:
        files = _write_files(place, snapshot, settings.allow_nonfinite)
        manifest = place.commit(files, snapshot.metrics, full=captured.full)
    settle(view, manifest, turn)


def _write_files(place: Destination, snapshot: Snapshot, allow: Sequence[str]) -> list[File]:
    """Write all files at the same time, so that slow syncs overlap."""
    name, captured = folder_name(snapshot.step), snapshot.captured
    parts = [(MODEL_FILE, captured.model, "model"), (OPTIMIZER_FILE, captured.others, "optimizer")]
    stop = threading.Event()

    def check_stop() -> None:
        place.check_stop()
        if stop.is_set():
            raise SaveAbandoned  # the other file failed

    def write(file: str, tensors: Mapping[str, Any], role: str) -> File:
        try:
            with place.file(file) as stream:
                key, sick = f"{name}/{file}", is_sick("" if role == "model" else "optimizer.", allow)
                return write_tensors(stream, tensors, key=key, role=role, check_stop=check_stop, sick=sick)
        except BaseException:
            stop.set()
            raise

    works = [functools.partial(write, *part) for part in parts if part[1] or part[0] == MODEL_FILE]
    try:
        return at_once([*works, functools.partial(write_state, place, name, snapshot.text)])
    finally:
        stop.set()  # an interrupted caller waits for none


def write_state(place: Destination, name: str, text: bytes) -> File:
    """Write and hash the state of a checkpoint with this future name."""
    from blake3 import blake3

    with place.file(STATE_FILE) as stream:
        stream.write(memoryview(text))
    key = f"{name}/{STATE_FILE}"
    return File(path=key, size=len(text), format="ckptguard_state", envelope=blake3(text).hexdigest())


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run each piece of work in its own thread. Returns their results in order, once all have ended.

    Of several failures, one other than SaveAbandoned is raised first. Plain threads, because an executor takes no work
    once the interpreter is ending, and a save may run then.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(1, len(works))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    for failure in sorted(failures, key=lambda f: isinstance(f, SaveAbandoned)):
        raise failure
    return [results[n] for n in range(len(works))]


def is_sharded(manifest: Manifest) -> bool:
    """True if torch.distributed.checkpoint's files hold its tensors: of several ranks, or of a sharded model."""
    return manifest.file(f"{manifest.path}/{MODEL_FILE}") is None


def read_checkpoint(run: Run, manifest: Manifest, parts: TrainingParts, *, allow: Sequence[str] = ()) -> dict[str, Any]:
    """Load a sealed checkpoint in place into `parts`, and hash every byte. Returns what else was saved (rng, data,
    ...).

    NaN and infinity are wrong, except in masks and in tensors that `allow` matches.

    Raises:
        NotAsSealed: the bytes are wrong. Model and optimizer may be half loaded.
        StateError: the checkpoint does not fit.
    """
    state = read_state(run, manifest)
    model = _read_tensors(run, manifest, MODEL_FILE, parts.model_tensors(), sick=is_sick("", allow))
    others: dict[str, Any] = {}
    if manifest.file(f"{manifest.path}/{OPTIMIZER_FILE}") is not None:
        sick = is_sick("optimizer.", allow)
        others = _read_tensors(run, manifest, OPTIMIZER_FILE, parts.other_tensors(), sick=sick, strict=False)
    if manifest.thinned:
        state.pop("optimizer", None)  # its tensors are gone
    parts.restore(state, model, others)
    return {key: decode_state(value) for key, value in state.items() if key not in _TAKEN}


def read_state(run: Run, manifest: Manifest) -> dict[str, Any]:
    """Return the state of a sealed checkpoint. Raises NotAsSealed if it differs from its digest."""
    from blake3 import blake3

    with _opened(run, manifest, STATE_FILE) as (sealed, reader):
        text = reader.read(0, reader.entry.size)
    if blake3(text).hexdigest() != sealed.envelope:
        raise NotAsSealed(f"{sealed.path} is not what was sealed")
    state = from_text(text)
    if not isinstance(state, dict) or state.get("ckptguard_state") != STATE_FORMAT:
        raise StateError(f"{sealed.path} has a format that this version does not know", hint="upgrade ckptguard")
    return state


def is_sick(prefix: str, allow: Sequence[str]) -> Callable[[str, Any], bool]:
    """Return the guard's judgement of a tensor with NaN or infinity."""

    def sick(name: str, tensor: Any) -> bool:
        # Beside the optimizer's tensors are a few in which infinity may be right.
        if prefix and name.partition(".")[0] in ("model", "scheduler", "scaler"):
            return False
        return first_of([(prefix + name, tensor)], allow) is not None

    return sick


def _read_tensors(
    run: Run,
    manifest: Manifest,
    file: str,
    into: Mapping[str, Any],
    *,
    sick: Callable[[str, Any], bool],
    strict: bool = True,
) -> dict[str, Any]:
    """Read tensors. Without `strict`, an existing tensor that does not fit is replaced by a new one."""
    with _opened(run, manifest, file) as (sealed, reader):
        wanted = into if strict else fitting(sealed, into)
        if run.storage.root is not None:
            return read_file(reader, sealed, wanted, sick=sick)
        with ThreadPoolExecutor(IN_FLIGHT) as requests, ReadAhead(reader, requests) as ahead:
            return read_file(ahead, sealed, wanted, sick=sick, threads=1)


@contextlib.contextmanager
def _opened(run: Run, manifest: Manifest, name: str) -> Iterator[tuple[File, Reader]]:
    sealed = manifest.file(f"{manifest.path}/{name}")
    if sealed is None:
        raise StateError(f"the manifest of {manifest.path} names no {name}")
    try:
        with run.storage.open(sealed.path) as reader:
            yield sealed, reader
    except ObjectMissingError as error:
        raise NotAsSealed(f"{sealed.path} is missing") from error
