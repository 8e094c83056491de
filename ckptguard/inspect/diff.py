"""Diff: which tensors two checkpoints do not share, and how far apart the others are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import msgspec

from ckptguard.errors import CkptguardError
from ckptguard.inspect.match_tensors import Matching, Prefix, match_tensors
from ckptguard.inspect.tensor_table import Contents, HeldTensor, TensorSource, find_source, read_contents
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import Progress
from ckptguard.scan.result import Difference
from ckptguard.storage import Reader
from ckptguard.values.ids import CheckpointId, Step
from ckptguard.values.incident import ChangedTensor, worded
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

MOST_SICK = 10  # of those that became non-finite, to leave room for those that only changed
MOST_CHANGES = 20
KINDS = ("changed", "retyped", "reshaped", "unknown", "added", "removed")


class DiffedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One side. `digests`: "recorded" if storage reports its files as sealed, else "read"."""

    path: str
    id: CheckpointId | None
    step: Step
    outcome: Outcome | None
    layout: str
    tensors: int
    digests: str


class TensorChange(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that differs between the sides. `change` is one of `KINDS`.

    "unknown" differs in its bytes, but its values cannot be compared, as `note` says. A tensor that is both reshaped
    and re-typed is "reshaped".
    """

    name: str
    role: str
    change: str
    a: HeldTensor | None
    b: HeldTensor | None
    difference: Difference | None = None
    note: str | None = None


class DamagedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose structure is damaged: some of its tensors may be missing from the comparison."""

    side: str  # "a" | "b"
    file: str
    message: str


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between two checkpoints. `changes`: first what became non-finite, then by relative L2 distance.

    The largest distance comes first. Changes without a distance follow in the order of `KINDS`.
    """

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
    """Compare two checkpoints, each a path or URL: files or folders, in a run or not, of any layouts.

    Raises:
        NotFoundError: one of them is not a checkpoint.
        RefusedError: one is too damaged to be read.
        CouldNotTellError: reading failed.
    """
    return diff_sources(find_source(a, settings), find_source(b, settings), work=work)


def diff_sources(a: TensorSource, b: TensorSource, *, work: Work = PLAIN) -> Diff:
    """Do the same for checkpoints that were found."""
    before = read_contents(a, work=work)
    after = read_contents(b, work=work)
    matching = match_tensors(before, after)
    with ExitStack() as stack:
        comparison = _Comparison((a, b), work.progress, stack)
        found = [comparison.change(x, y) for x, y in sorted(matching.pairs, key=lambda p: (p[0].key, p[1].key))]
        comparison.check_unchanged()
    changes = [c for c in found if c is not None]
    return Diff(
        a=_side(before),
        b=_side(after),
        same=len(found) - len(changes),
        prefixes=tuple(matching.renamings),
        changes=tuple(sorted([*changes, *_unpaired(matching)], key=weight)),
        damaged=tuple(
            DamagedFile(side=side, file=d.file, message=d.message)
            for side, contents in (("a", before), ("b", after))
            for d in contents.damage
        ),
    )


def weight(change: TensorChange) -> tuple[float, ...]:
    """Return the sort key of a change: smaller comes first."""
    found = change.difference
    if found is not None and found.became_nonfinite:
        return (0,)  # file order decides among these
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


def _change(
    kind: str, a: HeldTensor | None, b: HeldTensor | None, found: Difference | None = None, note: str | None = None
) -> TensorChange:
    """Return a change of a tensor that at least one side holds, under its name in `b`."""
    name, role = next((held.name, held.role) for held in (b, a) if held is not None)
    return TensorChange(name=name, role=role, change=kind, a=a, b=b, difference=found, note=note)


def _unpaired(matching: Matching) -> Iterable[TensorChange]:
    for chunks, others in matching.recut:
        note = f"it is stored in {len(chunks)} and in {len(others)} pieces that do not agree"
        change = _change("unknown", chunks[0], others[0], note=note)
        yield msgspec.structs.replace(change, name=chunks[0].name.partition("[")[0])
    yield from (_change("added", None, held) for held in matching.added)
    yield from (_change("removed", held, None) for held in matching.removed)


class _Comparison:
    """Compares paired tensors. It keeps one file of each side open, so pairs should come file by file."""

    def __init__(self, sources: tuple[TensorSource, TensorSource], progress: Progress | None, stack: ExitStack) -> None:
        self._sources, self._progress, self._stack = sources, progress, stack
        self._open: list[tuple[str, Reader] | None] = [None, None]

    def change(self, a: HeldTensor, b: HeldTensor) -> TensorChange | None:
        """Return how two paired tensors differ, or None."""
        if _same_bytes(a, b):
            return None
        if a.shape != b.shape:
            return _change("reshaped", a, b)
        retyped = a.dtype != b.dtype
        if a.place.span is None or b.place.span is None:
            return _change("retyped", a, b) if retyped else None
        from ckptguard.scan.compare import LocatedTensor, NotComparable, compare

        try:
            found = compare(
                LocatedTensor(self._reader(0, a.key), a.offset, a.place),
                LocatedTensor(self._reader(1, b.key), b.offset, b.place),
            )
        except NotComparable as error:
            return _change("retyped" if retyped else "unknown", a, b, note=str(error))
        if self._progress is not None:
            self._progress(a.length + b.length)
        # In a span that tensors share, another tensor may have changed.
        if not retyped and not found.differing:
            return None
        return _change("retyped" if retyped else "changed", a, b, found)

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
        """Raise ChangedWhileReadError if a file that is still open was written meanwhile."""
        for held in self._open:
            if held is not None:
                held[1].check_unchanged()


def _same_bytes(a: HeldTensor, b: HeldTensor) -> bool:
    """True if digests and places alone prove that two tensors are equal."""
    if a.shape != b.shape or a.dtype != b.dtype or a.digest is None or a.digest != b.digest:
        return False
    places = [(t.place.start, t.place.stop, t.place.strides, t.place.byte_order, t.length) for t in (a, b)]
    return places[0] == places[1]


def shown(changes: Sequence[TensorChange], most: int | None) -> list[TensorChange]:
    """Return at most this many changes of each kind, in order."""
    left = dict.fromkeys(KINDS, len(changes) if most is None else most)
    kept = []
    for change in changes:
        if left[change.change] > 0:
            left[change.change] -= 1
            kept.append(change)
    return kept


def changed_tensors(
    good: TensorSource, bad: TensorSource, largest: Mapping[str, float], *, work: Work = PLAIN
) -> tuple[tuple[ChangedTensor, ...], int, str | None]:
    """Compare the first bad checkpoint with the last good one for a report. Never raises because of the bytes.

    Returns the changes (what became non-finite, then what changed most), how many more there are, and why the
    comparison failed or is partial. `largest` maps the good one's tensors to their largest finite magnitudes.
    """
    try:
        found = diff_sources(good, bad, work=work)
    except CkptguardError as error:
        return (), 0, f"the two cannot be compared: {error.message}"
    sick = [c for c in found.changes if c.difference is not None and c.difference.became_nonfinite]
    rest = [c for c in found.changes if c.difference is None or not c.difference.became_nonfinite]
    kept = sick[:MOST_SICK]
    kept += rest[: MOST_CHANGES - len(kept)]
    damaged = next(iter(found.damaged), None)
    note = f"{damaged.file} is damaged, so this may not be all" if damaged is not None else None
    return tuple(_changed(c, largest) for c in kept), len(found.changes) - len(kept), note


def _changed(change: TensorChange, largest: Mapping[str, float]) -> ChangedTensor:
    found, before, side = change.difference, change.a, change.b or change.a
    return ChangedTensor(
        name=change.name,
        role=change.role,
        change=change.change,
        dtype=side.dtype if side is not None else None,
        elements=found.count if found is not None else None,
        became_nonfinite=found.became_nonfinite if found is not None else 0,
        first_nonfinite=found.first_nonfinite if found is not None else None,
        relative_l2=worded(found.relative_l2) if found is not None else None,
        largest_change=worded(found.largest_change) if found is not None else None,
        largest=largest.get(before.name) if before is not None and change.role == "model" else None,
        note=change.note,
    )
