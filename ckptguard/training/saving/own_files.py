"""The parts of which a save of our own layout is made, wherever it goes."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ckptguard.errors import ObjectMissingError, StateError
from ckptguard.keep.quarantine import quarantine
from ckptguard.layouts.own import STATE_FILE
from ckptguard.records.run import Run
from ckptguard.runs.listing import find_checkpoint
from ckptguard.storage.failures import translated
from ckptguard.training.content.tagged_json import from_text
from ckptguard.training.signals.weights import first_of
from ckptguard.values.manifest import File, Manifest

STATE_FORMAT = 1


def make_room(run: Run, path: str) -> None:
    """Move aside whatever lies under a name that is about to be written: an older generation of the same step."""
    try:
        run.storage.stat(path)
    except ObjectMissingError:
        return
    if find_checkpoint(run, path) is not None:
        quarantine(run, path, reason="the step is saved again", suspect=False)
    else:
        # An empty folder, or a file where a folder belongs: no checkpoint, but somebody's: it is never removed.
        run.storage.move(path, f"tmp-aside-{uuid.uuid4().hex[:8]}")


def write_state(folder: str, name: str, text: bytes) -> File:
    """Write, hash and fsync the state of a checkpoint that will have this name."""
    from blake3 import blake3

    key = f"{name}/{STATE_FILE}"
    with translated(key, folder), open(os.path.join(folder, STATE_FILE), "xb", buffering=0) as file:
        left = memoryview(text)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    return File(path=key, size=len(text), format="ckptguard_state", envelope=blake3(text).hexdigest())


def as_stored(run: Run, file: File) -> File:
    """The file with what the storage says of it under its final path."""
    entry = run.storage.stat(file.path)
    return msgspec.structs.replace(file, mtime_ns=entry.mtime_ns, inode=entry.inode, etag=entry.etag)


def read_state(run: Run, manifest: Manifest) -> tuple[dict[str, Any], str | None]:
    """The state of a sealed checkpoint, held against its digest, and what is wrong with its bytes."""
    from blake3 import blake3

    sealed = manifest.file(f"{manifest.path}/{STATE_FILE}")
    if sealed is None:
        raise StateError(f"the manifest of {manifest.path} names no {STATE_FILE}")
    try:
        with run.storage.open(sealed.path) as reader:
            text = reader.read(0, reader.entry.size)
    except ObjectMissingError:
        return {}, f"{sealed.path} is not there"
    if blake3(text).hexdigest() != sealed.envelope:
        return {}, f"{sealed.path} is not what was sealed"
    state = from_text(text)
    if not isinstance(state, dict) or state.get("ckptguard_state") != STATE_FORMAT:
        raise StateError(f"{sealed.path} has a format that this version does not know", hint="upgrade ckptguard")
    return state, None


def is_sick(prefix: str, allow: Sequence[str]) -> Callable[[str, Any], bool]:
    """What a guard would say of a tensor that holds NaN or infinity, as soon as it looks at it."""

    def sick(name: str, tensor: Any) -> bool:
        # Beside the optimizer's tensors, under names without its own, lie a few of which infinity may be right.
        if prefix and name.partition(".")[0] in ("model", "scheduler", "scaler"):
            return False
        return first_of([(prefix + name, tensor)], allow) is not None

    return sick
