"""Diff: which tensors two checkpoints do not have in common, and how far apart the others are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import msgspec

from ckptguard.inspect.match_tensors import Matching, match_tensors
from ckptguard.inspect.tensor_table import Contents, HeldTensor, TensorSource, find_source, read_contents
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import Progress
from ckptguard.scan.tensor_difference import Difference
from ckptguard.storage import Reader
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

KINDS = ("changed", "retyped", "reshaped", "unknown", "added", "removed")


class DiffedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One side. `digests`: "recorded", if its files are by all that storage says the sealed ones, else "read"."""

    path: str
    id: CheckpointId | None
    step: int | None
    outcome: Outcome | None
    layout: str
    tensors: int
    digests: str


class DiffedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of one side."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]


class TensorChange(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that is not the same on both sides. `change` is one of `KINDS`: "unknown" differs in its bytes, but its
    values cannot be put side by side, as `note` says; a tensor that is both reshaped and re-typed is "reshaped"."""

    name: str
    role: str
    change: str
    a: DiffedTensor | None
    b: DiffedTensor | None
    difference: Difference | None = None
    note: str | None = None


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """All names of a role begin with `a` on one side and with `b` on the other; they were compared all the same."""

    role: str
    a: str
    b: str
    tensors: int


class DamagedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose structure is damaged: what it should hold may be missing from the comparison."""

    side: str  # "a" | "b"
    file: str
    message: str


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """What two checkpoints differ in. `changes`: what became non-finite first, then by relative L2 distance, largest
    first; then what has no distance, in the order of `KINDS`."""

    a: DiffedCheckpoint
    b: DiffedCheckpoint
    same: int
    prefixes: tuple[Prefix, ...]
    changes: tuple[TensorChange, ...]
    damaged: tuple[DamagedFile, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors there are of each kind of change."""
        return {kind: sum(c.change == kind for c in self.changes) for kind in KINDS}


def diff(a: str, b: str, settings: Settings, *, work: Work = PLAIN) -> Diff:
    """Compare two checkpoints, each a path or URL: files or folders, of a run or stray, of any layouts.

    NotFoundError for what is no checkpoint, RefusedError for one too damaged to be read, CouldNotTellError and its
    kinds where reading fails.
    """
    first, second = find_source(a, settings), find_source(b, settings)
    return diff_sources(first, second, work=work)


def diff_sources(a: TensorSource, b: TensorSource, *, work: Work = PLAIN) -> Diff:
    """The same for checkpoints that were found."""
    before = read_contents(a, work=work)
    after = read_contents(b, work=work)
    matching = match_tensors(before, after)
    with _Comparison(a, b, work.progress) as comparison:
        found = [comparison.change(x, y) for x, y in sorted(matching.pairs, key=lambda p: (p[0].key, p[1].key))]
        comparison.check_unchanged()
    changes = [c for c in found if c is not None]
    return Diff(
        a=_side(before),
        b=_side(after),
        same=len(found) - len(changes),
        prefixes=tuple(Prefix(role=r.role, a=r.a, b=r.b, tensors=r.tensors) for r in matching.renamings),
        changes=tuple(sorted([*changes, *_unpaired(matching)], key=weight)),
        damaged=tuple(
            DamagedFile(side=side, file=d.file, message=d.message)
            for side, contents in (("a", before), ("b", after))
            for d in contents.damage
        ),
    )


def weight(change: TensorChange) -> tuple[float, ...]:
    """The place of a change in the order: smaller comes first."""
    found = change.difference
    if found is not None and found.became_nonfinite:
        return (0,)  # among these the order of the files decides
    if found is not None and found.relative_l2 is not None:
        return (1, -found.relative_l2)
    share = found.differing / found.count if found is not None and found.count else 0.0
    return (2, KINDS.index(change.change), -share)


def _side(contents: Contents) -> DiffedCheckpoint:
    source = contents.source
    return DiffedCheckpoint(
        path=source.url,
        id=source.id,
        step=source.checkpoint.step,
        outcome=source.outcome,
        layout=source.checkpoint.layout,
        tensors=len(contents.tensors),
        digests=contents.digests,
    )


def _tensor(held: HeldTensor) -> DiffedTensor:
    return DiffedTensor(name=held.name, file=held.file, dtype=held.place.dtype, shape=held.place.shape)


def _unpaired(matching: Matching) -> Iterable[TensorChange]:
    for chunks, others in matching.recut:
        whole = chunks[0]
        note = f"it is stored in {len(chunks)} and in {len(others)} pieces that do not agree"
        yield TensorChange(
            name=whole.name.partition("[")[0],
            role=whole.role,
            change="unknown",
            a=_tensor(whole),
            b=_tensor(others[0]),
            note=note,
        )
    for held in matching.added:
        yield TensorChange(name=held.name, role=held.role, change="added", a=None, b=_tensor(held))
    for held in matching.removed:
        yield TensorChange(name=held.name, role=held.role, change="removed", a=_tensor(held), b=None)


class _Comparison:
    """Compares paired tensors; keeps one file of each side open, so pairs should come file by file."""

    def __init__(self, a: TensorSource, b: TensorSource, progress: Progress | None) -> None:
        self._sources = (a, b)
        self._progress = progress
        self._open: list[tuple[str, Reader] | None] = [None, None]
        self._stack = ExitStack()

    def change(self, a: HeldTensor, b: HeldTensor) -> TensorChange | None:
        """How two tensors that belong together differ; None if they do not."""
        if _same_bytes(a, b):
            return None
        fields = {"name": b.name, "role": b.role, "a": _tensor(a), "b": _tensor(b)}
        if a.place.shape != b.place.shape:
            return TensorChange(change="reshaped", **fields)  # type: ignore[arg-type]
        retyped = a.place.dtype != b.place.dtype
        if a.place.span is None or b.place.span is None:
            return TensorChange(change="retyped", **fields) if retyped else None  # type: ignore[arg-type]
        from ckptguard.scan.compare import LocatedTensor, NotComparable, compare

        try:
            found = compare(
                LocatedTensor(self._reader(0, a.key), a.offset, a.place),
                LocatedTensor(self._reader(1, b.key), b.offset, b.place),
            )
        except NotComparable as error:
            kind = "retyped" if retyped else "unknown"
            return TensorChange(change=kind, note=str(error), **fields)  # type: ignore[arg-type]
        if self._progress is not None:
            self._progress(a.length + b.length)
        if retyped:
            return TensorChange(change="retyped", difference=found, **fields)  # type: ignore[arg-type]
        # Of a span that tensors share, another one may have changed.
        return TensorChange(change="changed", difference=found, **fields) if found.differing else None  # type: ignore[arg-type]

    def _reader(self, side: int, key: str) -> Reader:
        held = self._open[side]
        if held is None or held[0] != key:
            if held is not None:
                held[1].check_unchanged()
                held[1].close()
            reader = self._stack.enter_context(self._sources[side].storage.open(key))
            self._open[side] = held = (key, reader)
        return held[1]

    def check_unchanged(self) -> None:
        """ChangedWhileReadError if a file that is still open was written meanwhile."""
        for held in self._open:
            if held is not None:
                held[1].check_unchanged()

    def __enter__(self) -> _Comparison:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def _same_bytes(a: HeldTensor, b: HeldTensor) -> bool:
    """Whether digests and places alone say that two tensors are equal."""
    if a.place.shape != b.place.shape or a.place.dtype != b.place.dtype or a.digest is None or a.digest != b.digest:
        return False
    places = [(t.place.start, t.place.stop, t.place.strides, t.place.byte_order, t.length) for t in (a, b)]
    return places[0] == places[1]


def shown(changes: Sequence[TensorChange], most: int | None) -> list[TensorChange]:
    """At most so many changes of each kind, in order."""
    left = dict.fromkeys(KINDS, len(changes) if most is None else most)
    kept = []
    for change in changes:
        if left[change.change] > 0:
            left[change.change] -= 1
            kept.append(change)
    return kept
