"""Two checkpoints compared: by their manifests, or by reading what differs, which is asked for with its cost."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ckptguard.documents.build import Document, document, fields, plain
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import BusyError, CouldNotTellError, NotFoundError
from ckptguard.formats.structure import TensorPlace
from ckptguard.inspect.diff import KINDS, Diff, diff_sources
from ckptguard.inspect.list_states import survey
from ckptguard.inspect.match_tensors import match_tensors
from ckptguard.inspect.tensor_table import HeldTensor, TensorSource, locate
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.values.ids import CheckpointId, escape
from ckptguard.values.manifest import File, Manifest, Tensor
from ckptguard_daemon.dashboard.one_checkpoint import (
    inside,
    sealed_and_judged,
    sick_tensors,
    side_fields,
    tensor_fields,
)
from ckptguard_daemon.http.replies import escaped
from ckptguard_daemon.http.routes import Role, Route, Served
from ckptguard_daemon.loop import LaneScanner
from ckptguard_daemon.reading import Reads, counted_view, id_of, unknown

MOST_READING = 300.0  # seconds for reading tensors
_MOST_CHANGES = 5000


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""
    reading = threading.Lock()  # one comparison at a time reads tensors

    async def diff(request: Request) -> Response:
        run, a, b = served.run_of(request), id_of(request, "a"), id_of(request, "b")
        if request.query_params.get("read") != "1":
            return await served.clicks.answer(request, lambda reads: _by_manifests(run, a, b, reads))
        return await served.clicks.answer(request, lambda reads: _by_reading(run, a, b, served.stop, reading))

    return [Route("/v1/runs/{run}/diff", diff, Role.READER)]


class _Side:
    """One checkpoint by its records: its tensors, each with its manifest's numbers."""

    def __init__(self, view: RunView, id: CheckpointId) -> None:
        manifest, judged = sealed_and_judged(view, id)
        if manifest is None:
            raise unknown(id, view.run)
        self.id, self.step, self.manifest, self.verdict = id, id.step, manifest, judged.counts
        self.sick = sick_tensors(self.verdict)
        stated = [(_held(tensor, file, manifest), tensor, file) for file in manifest.files for tensor in file.tensors]
        self.tensors = [held for held, _, _ in stated]
        self._stated = {(held.key, held.name): (tensor, file) for held, tensor, file in stated}
        spans = Counter((held.key, held.place.span) for held in self.tensors)
        self._shared = {span for span, users in spans.items() if users > 1}

    def fields(self, held: HeldTensor) -> Document:
        """Return a tensor as a document shows it."""
        tensor, file = self._stated[held.key, held.name]
        return tensor_fields(tensor, file, self.manifest, self.sick.get((held.key, held.name)))

    def shares(self, held: HeldTensor) -> bool:
        """True if other tensors have their bytes in the same span, so that its digest may differ for their sake."""
        return (held.key, held.place.span) in self._shared


def _held(tensor: Tensor, file: File, manifest: Manifest) -> HeldTensor:
    span = file.spans[tensor.span] if tensor.span is not None else None
    place = TensorPlace(tensor.name, tensor.dtype, tensor.shape, tensor.span)
    offset, length, digest = (span.offset, span.length, span.blake3) if span is not None else (0, 0, None)
    return HeldTensor(tensor.name, tensor.role, inside(file.path, manifest), file.path, place, offset, length, digest)


def _by_manifests(watched: WatchedRun, a: CheckpointId, b: CheckpointId, reads: Reads) -> Document:
    view = counted_view(watched, reads)
    before, after = _Side(view, a), _Side(view, b)
    matching = match_tensors(before, after)
    kinds = [(x, y, _change(x, y)) for x, y in matching.pairs]
    changes = [_change_fields(before, after, x, y, kind) for x, y, kind in kinds if kind is not None]
    changes += [_change_fields(before, after, own[0], others[0], "unknown") for own, others in matching.recut]
    changes += [_change_fields(before, after, None, held, "added") for held in matching.added]
    changes += [_change_fields(before, after, held, None, "removed") for held in matching.removed]
    changes.sort(key=_weight)
    differing = [(x, y) for x, y, kind in kinds if kind in ("changed", "retyped")]
    return {
        **document("diff", run=watched.run_id),
        "a": side_fields(a, before.manifest, before.verdict),
        "b": side_fields(b, after.manifest, after.verdict),
        "read": False,
        "would_read": sum(x.length + y.length for x, y in differing),
        "same": sum(kind is None for _, _, kind in kinds),
        "counts": {kind: sum(change["change"] == kind for change in changes) for kind in KINDS},
        "prefixes": escaped(plain(matching.renamings)),
        "changes": changes[:_MOST_CHANGES],
        "omitted": max(0, len(changes) - _MOST_CHANGES),
        "damaged": [],
    }


def _change(a: HeldTensor, b: HeldTensor) -> str | None:
    """Return how two paired tensors differ by their manifests; None if they are equal."""
    if a.place.shape != b.place.shape:
        return "reshaped"
    if a.place.dtype != b.place.dtype:
        return "retyped"
    return None if a.digest == b.digest else "changed"


def _change_fields(before: _Side, after: _Side, a: HeldTensor | None, b: HeldTensor | None, change: str) -> Document:
    held = b if b is not None else a
    assert held is not None
    x = None if a is None else before.fields(a)
    y = None if b is None else after.fields(b)
    grown = None
    if x is not None and y is not None and x["rms"] and y["rms"] is not None:
        grown = y["rms"] / x["rms"]
    shares = (a is not None and before.shares(a)) or (b is not None and after.shares(b))
    note = (
        "it shares its bytes with other tensors, which may be what differs" if shares and change == "changed" else None
    )
    return {
        "name": escape(held.name),
        "role": held.role,
        "change": change,
        "a": x,
        "b": y,
        "rms_ratio": grown,
        "difference": None,
        "note": "its pieces were cut differently" if change == "unknown" else note,
    }


def _weight(change: Document) -> tuple[float, ...]:
    """Return the sort key: first what became non-finite, then by how much the magnitudes differ."""
    a, b, ratio = change["a"], change["b"], change["rms_ratio"]
    became = b is not None and b["problem"] is not None and (a is None or a["problem"] is None)
    distance = abs(math.log(ratio)) if ratio else math.inf if ratio == 0 else 0.0
    return (0.0 if became else 1.0, float(KINDS.index(change["change"])), -distance)


def _by_reading(
    watched: WatchedRun, a: CheckpointId, b: CheckpointId, stop: threading.Event, reading: threading.Lock
) -> Document:
    """Compare by reading every tensor that differs."""
    if not reading.acquire(blocking=False):
        raise BusyError("another comparison reads tensors now", hint="try again when it is done")
    try:
        view = watched.look()
        states = {state.id: state for state in survey(view)}
        sources = []
        for id in (a, b):
            state = states.get(id)
            source = locate(view, state) if state is not None else None
            if source is None:
                raise NotFoundError(f"the files of {id} are not there any more")
            sources.append(source)
        found = _read(watched, (sources[0], sources[1]), stop)
    finally:
        reading.release()
    shown = msgspec.structs.replace(found, changes=found.changes[:_MOST_CHANGES])
    names = {"a": a.record_path, "b": b.record_path}
    sides = {side: {**fields(getattr(found, side)), "name": name} for side, name in names.items()}
    omitted = len(found.changes) - len(shown.changes)
    answer = {**fields(shown), "counts": found.counts, "omitted": omitted, **sides}
    return {**document("diff", run=watched.run_id), "read": True, "would_read": 0, **escaped(answer), "reads": None}


def _read(watched: WatchedRun, sources: tuple[TensorSource, TensorSource], stop: threading.Event) -> Diff:
    until = time.monotonic() + MOST_READING

    def progress(size: int) -> None:
        if stop.is_set() or time.monotonic() > until:
            hint = "run `ckptguard diff` instead"
            raise CouldNotTellError(f"reading both took more than {MOST_READING:.0f} seconds", hint=hint)

    scanner = LaneScanner(stop)  # a file that harms its reader harms only a process of its own
    try:
        work = Work(scanner=scanner.by(watched.settings), progress=progress, stop=stop)
        return diff_sources(*sources, work=work)
    finally:
        scanner.close()
