"""The content of a checkpoint, tensor by tensor: where each one is, and its span's digest."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from ckptguard.errors import CouldNotTellError, NotFoundError, RefusedError, StorageError
from ckptguard.formats.structure import TensorPlace
from ckptguard.inspect.list_states import CheckpointState
from ckptguard.layouts import Checkpoint
from ckptguard.records.kept import read_kept
from ckptguard.records.quarantine import read_quarantined
from ckptguard.records.run import Run
from ckptguard.records.trash import trash_folder
from ckptguard.runs.run_view import RunView
from ckptguard.runs.target import resolve_target, several_checkpoints
from ckptguard.runs.work import Work
from ckptguard.scan import ScanOptions
from ckptguard.scan.result import ScannedFile
from ckptguard.storage import Storage
from ckptguard.values.ids import CheckpointId, Step
from ckptguard.values.manifest import File, Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.collect_evidence import roles_of


@dataclass(frozen=True)
class TensorSource:
    """One checkpoint at its place, with what is recorded about it. `url` can be opened as it is."""

    url: str
    storage: Storage
    checkpoint: Checkpoint
    id: CheckpointId | None = None
    outcome: Outcome | None = None
    sealed: Manifest | None = None
    run: Run | None = None


class HeldTensor(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint. `file` is its file inside the checkpoint, `key` that of the storage.

    `offset` and `digest` are those of its span (None: no bytes in the file).
    """

    name: str
    role: str
    file: str
    key: str
    place: TensorPlace
    offset: int
    length: int
    digest: str | None

    @property
    def dtype(self) -> str:
        """The type of its elements."""
        return self.place.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.place.shape


class Damage(NamedTuple):
    """Something wrong with the structure of a file."""

    file: str
    message: str


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint in file order. `digests`: "recorded" in the manifest of exactly these files, or
    "read" now."""

    source: TensorSource
    tensors: tuple[HeldTensor, ...]
    damage: tuple[Damage, ...]
    digests: str

    @property
    def step(self) -> Step:
        """The step of the checkpoint."""
        return self.source.checkpoint.step


def find_source(target: str, settings: Settings) -> TensorSource:
    """Return the one checkpoint that a path or URL names, in a run or not. Raises NotFoundError for a run."""
    resolved = resolve_target(target, settings)
    checkpoint, view = resolved.checkpoint, resolved.view
    if checkpoint is None:
        raise several_checkpoints(resolved, target)
    source = TensorSource(resolved.url, resolved.storage, checkpoint)
    id = view.current_if_readable(checkpoint) if view is not None else None
    if view is None or id is None:
        return source
    verdict = view.history.verdict(id)
    outcome = verdict.outcome if verdict else None
    return replace(source, id=id, outcome=outcome, sealed=view.history.manifest(id), run=view.run)


def locate(view: RunView, state: CheckpointState) -> TensorSource | None:
    """Return where a surveyed checkpoint can be read now: in place, quarantine, kept copy or trash. None if it is
    gone."""
    run, id = view.run, state.id
    if state.in_place:
        checkpoint = view.look_again(state.path)
        if checkpoint is None:
            return None
        sealed = view.history.manifest(id) if id is not None else None
        return TensorSource(run.usable(state.path), run.storage, checkpoint, id, state.outcome, sealed)
    if id is None:
        return None
    mark, copy = read_quarantined(run, id), read_kept(run, id)
    places = []
    if mark is not None:
        places.append(mark.folder if mark.path == "." else f"{mark.folder}/{mark.path}")
    if state.kept and copy is not None:
        places.append(copy.checkpoint_key)
    if state.trashed:
        places.append(f"{trash_folder(id)}/{state.path}")
    for place in places:
        try:
            found = find_source(run.usable_record(place), Settings())
        except (NotFoundError, StorageError):
            continue
        return replace(found, id=id, outcome=state.outcome)
    return None


def read_contents(source: TensorSource, *, work: Work) -> Contents:
    """Read the content of a checkpoint. Files that storage reports as sealed keep their recorded digests.

    All others are read once.

    Raises:
        RefusedError: damage hides every tensor.
        CouldNotTellError: it holds no tensors.
    """
    checkpoint, storage = source.checkpoint, source.storage
    structures = work.scanner(storage, checkpoint.files, ScanOptions(structure_only=True), None).files
    found = {f.entry.key: f for f in structures}
    digests = {key: _recorded(source.sealed.file(key) if source.sealed else None, f) for key, f in found.items()}
    unread = [key for key, file in found.items() if file.structure.spans and digests[key] is None]
    if unread:
        for file in work.scanner(storage, unread, ScanOptions(md5=False), work.progress).files:
            found[file.entry.key] = file
            digests[file.entry.key] = file.span_digests
    files = [found[key] for key in checkpoint.files]
    roles = roles_of(files)
    tensors = tuple(t for f in files for t in _held(checkpoint, f, roles[f.entry.key], digests[f.entry.key] or ()))
    damage = tuple(Damage(checkpoint.inside(f.entry.key), p.message) for f in files for p in f.structure.problems)
    if not tensors and damage:
        said = f"{source.url} cannot be read: {damage[0].file}: {damage[0].message}"
        raise RefusedError(said, outcome="bad", hint=f"ckptguard verify {shlex.quote(source.url)}")
    if not tensors:
        raise CouldNotTellError(f"{source.url} holds no tensors that ckptguard can read")
    return Contents(source, tensors, damage, "read" if unread else "recorded")


def _recorded(sealed: File | None, found: ScannedFile) -> tuple[str, ...] | None:
    """Return the sealed digests of a file's spans, if storage reports no change since."""
    if sealed is None or (sealed.size, sealed.mtime_ns, sealed.inode, sealed.etag) != found.entry.signature:
        return None
    if [(s.offset, s.length) for s in sealed.spans] != [(s.offset, s.length) for s in found.structure.spans]:
        return None
    return tuple(s.blake3 for s in sealed.spans)


def _held(checkpoint: Checkpoint, file: ScannedFile, roles: Sequence[str], digests: Sequence[str]) -> list[HeldTensor]:
    key = file.entry.key
    inside = checkpoint.inside(key)
    if inside == key:
        inside = key.rpartition("/")[2] if checkpoint.path == key else key
    held = []
    for tensor, role in zip(file.structure.tensors, roles, strict=True):
        span = file.structure.spans[tensor.span] if tensor.span is not None else None
        digest = digests[tensor.span] if tensor.span is not None else None
        offset, length = (span.offset, span.length) if span else (0, 0)
        held.append(HeldTensor(tensor.name, role, inside, key, tensor, offset, length, digest))
    return held
