"""The objects in a ``.metadata`` pickle, kept small, because there may be a million of them.

As soon as an object's state is set, it becomes a plain tuple, and the memo keeps only what is fetched again. Objects
are recognised by the names of their attributes, because subclasses are in use.

Many tensors are described with the same bytes. Such bytes are also read alone the first time. That proves that they
need and change nothing except the value that they leave. When the same bytes come again, that value is used.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from ckptguard.formats.dcp import switch
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.containers import never_set
from ckptguard.formats.pickle.inert_values import Call, Global, Mapping, Sequence
from ckptguard.formats.pickle.machine import COSTS, Machine, Pickled, read_pickle, run_machine

BUDGET = 768 << 20
# Each is less than the cheapest folded object costs.
_OBJECT_REFUND = 500
_SIZE_REFUND = 150
_COSTS = tuple(4 if code == ord("\x94") else cost for code, cost in enumerate(COSTS))  # few are kept
_MAX_MEMO = 2_000_000
_MAX_FETCHES = 20_000_000
_BLOCK = 1 << 20
_MAX_DIMENSIONS = 64
_LIMIT = 2**63
_MEMOIZE = 0x94
_ROOM_ALONE = 1 << 20
KEY = 64  # bytes that distinguish descriptions at first: nearly always the tensor's shape is among them
LONGEST = 1 << 12
MOST = 4096  # descriptions that are kept
MAX_HITS = 1_000_000


class Piece(NamedTuple):
    """Where a stored piece belongs in its tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class TensorEntry(NamedTuple):
    """A tensor's full shape, its dtype and its pieces (None for an impossible one)."""

    dtype: str
    size: tuple[int, ...]
    pieces: tuple[Piece | None, ...]


class StoredItem(NamedTuple):
    """The content of a stored range: a tensor's piece that begins at `offsets`, or (None) an object."""

    name: str
    offsets: tuple[int, ...] | None


class StoredRange(NamedTuple):
    """Where it is stored. `packed`: it was compressed or otherwise transformed."""

    path: str
    offset: int
    length: int
    packed: bool


class Repeat(NamedTuple):
    """Bytes of the pickle and the value that they make. `memos` are the values put into the memo meanwhile, in order.

    UNRESOLVED replaces those that something may still change.
    """

    raw: bytes
    value: object
    memos: tuple[object, ...]


UNRESOLVED = object()  # replaces earlier values that may still change: code that looks into it finds nothing


class EarlierMemo(dict[int, object]):
    """The memo as it was before the bytes, for reading them alone."""

    def __init__(self, memo: dict[int, object], end: int) -> None:
        super().__init__()
        self._memo = memo
        self._end = end

    def __missing__(self, index: int) -> object:
        # Memo numbers differ each time, and these numbers then belong to other values.
        return immutable(self._memo[index]) if index < self._end else UNRESOLVED


def immutable(value: object) -> object:
    """Return the value if nothing can change it any longer, else UNRESOLVED."""
    kind = type(value)
    if kind is str or kind is int or kind is Global or value is None:
        return value
    if isinstance(value, tuple) and len(value) <= _MAX_DIMENSIONS and all(type(n) is int for n in value):
        return value
    return UNRESOLVED


def read_metadata_pickle(data: bytes) -> Pickled:
    """Return the pickle with its objects folded. Raises PickleProblem like `read_pickle`."""
    try:
        return run_machine(_FoldingMachine(data), 0, BUDGET)
    except _OtherProtocolError:
        return read_pickle(data)


def fold(value: object) -> object:
    """Return the plain tuple for a known and valid object; else the value itself."""
    if type(value) is not Call:
        return value
    fields = attributes(value)
    folds = next((folds for name, folds in _KINDS.items() if name in fields), None)
    return value if folds is None else folds(fields) or value


def attributes(value: object) -> dict[str, object]:
    """Return the attributes that are set on an object."""
    state = value.state if type(value) is Call else None
    if type(state) is not Mapping:
        return {}
    return {k: v for k, v in zip(state.flat[::2], state.flat[1::2], strict=False) if type(k) is str}


def _piece(fields: dict[str, object]) -> Piece | None:
    offsets, sizes = _sizes(fields.get("offsets")), _sizes(fields["sizes"])
    return None if offsets is None or sizes is None else Piece(offsets, sizes)


def _tensor(fields: dict[str, object]) -> TensorEntry | None:
    dtype, size, pieces = _dtype(fields.get("properties")), _sizes(fields.get("size")), fields["chunks"]
    if dtype is None or size is None or type(pieces) is not Sequence:
        return None
    folded = (fold(piece) for piece in pieces.items)
    return TensorEntry(dtype, size, tuple(p if type(p) is Piece else None for p in folded))


def _item(fields: dict[str, object]) -> StoredItem | None:
    name, stated = fields["fqn"], fields.get("offset")
    offsets = None if stated is None else _sizes(stated)
    return StoredItem(name, offsets) if type(name) is str and (offsets is not None or stated is None) else None


def _range(fields: dict[str, object]) -> StoredRange | None:
    path, offset, length = fields["relative_path"], fields.get("offset"), fields.get("length")
    transforms = fields.get("transform_descriptors")
    packed = transforms is not None and not (type(transforms) is Sequence and not transforms.items)
    if type(path) is not str or type(offset) is not int or type(length) is not int:
        return None
    return StoredRange(path, offset, length, packed) if 0 <= offset < _LIMIT and 0 < length < _LIMIT else None


def _sizes(value: object) -> tuple[int, ...] | None:
    if type(value) is Call:
        if not value.calls("torch.Size") or type(value.args) is not tuple or len(value.args) != 1:
            return None
        value = value.args[0]
    if type(value) is Sequence:
        value = tuple(value.items)
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS:
        return None
    return value if all(type(n) is int and 0 <= n < _LIMIT for n in value) else None


def _dtype(properties: object) -> str | None:
    state = properties.state if type(properties) is Call else None
    dtype = state[0] if type(state) is tuple and state else attributes(properties).get("dtype")
    return dtype.name if type(dtype) is Global and dtype.module == "torch" else None


_KINDS: dict[str, Callable[[dict[str, object]], object]] = {
    "sizes": _piece,
    "chunks": _tensor,
    "relative_path": _range,
    "fqn": _item,
}


def _fetched(data: bytes) -> set[int]:
    """Return all memo numbers that may be fetched: those in four bytes after a ``j``, and all small ones."""
    if data.count(b"j") > _MAX_FETCHES:
        raise PickleProblem("the pickle refers back to values more often than ckptguard allows", too_large=True)
    found, most = set(range(256)), data.count(b"\x94")
    for begin in range(0, len(data), _BLOCK):
        places = re.findall(rb"j(?=(....))", data[begin : begin + _BLOCK + 4], re.DOTALL)
        found.update(n for n in struct.unpack(f"<{len(places)}I", b"".join(places)) if n < most)
        if len(found) > _MAX_MEMO:
            raise PickleProblem("the pickle refers back to more values than ckptguard allows", too_large=True)
    return found


class _OtherProtocolError(PickleProblem):
    """The memo is not numbered in order, as all writers of the format do."""


class _FoldingMachine(Machine):
    """Folds objects as they are finished. `_fetched` finds before the start what may be fetched again."""

    __slots__ = ("begun", "framed", "hits", "kept", "memoized", "repeats", "shared", "wanted")

    def __init__(self, data: bytes) -> None:
        super().__init__(data, 0)
        self.costs = _COSTS
        self.kept: dict[int, object] = {}  # of the memo, what is fetched again
        self.memoized = 0
        self.wanted = _fetched(data)
        self.shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.framed = 0  # where the last frame that began ends
        self.repeats: dict[bytes, Repeat] = {}
        self.hits = 0
        self.begun = (0, 0, 0, 0)  # after the last name: position, values and marks on the stack, memoized
        for name in ("binput", "long_binput", "text_put", "text_get"):
            step: Callable[[int], int] = getattr(self, name)
            self.steps = [self.other_protocol if s == step else s for s in self.steps]

    def other_protocol(self, p: int) -> int:
        raise _OtherProtocolError("")

    def frame_end(self, p: int) -> int:
        self.framed = super().frame_end(p)
        return self.framed

    def memoize(self, p: int) -> int:
        if self.memoized in self.wanted:
            self.keep(self.memoized, self.stack[-1])
        self.memoized += 1
        return p

    def keep(self, index: int, value: object) -> None:
        self.kept[index] = value
        if len(self.kept) > _MAX_MEMO:
            raise PickleProblem("the pickle refers back to more values than ckptguard allows", too_large=True)

    def recall(self, index: int, p: int) -> int:
        try:
            self.stack.append(self.kept[index])
        except KeyError as error:
            raise never_set(index) from error
        return p

    def short_unicode(self, p: int) -> int:
        p = super().short_unicode(p)
        if p >= self.framed or self.data[p] != _MEMOIZE:
            return p
        p = self.memoize(p + 1)
        known = self.repeats.get(self.data[p : p + KEY])
        if known is not None and self.data.startswith(known.raw, p) and self.repeat(known, p + len(known.raw)):
            return p + len(known.raw)
        self.begun = (p, len(self.stack), len(self.marks), self.memoized)
        return p

    def repeat(self, known: Repeat, end: int) -> bool:
        """Push what these bytes make. False if they reach beyond the frame, or if a value made on the way is fetched
        again."""
        if end > self.framed:
            return False
        own = range(self.memoized, self.memoized + len(known.memos))
        fetched = [] if self.wanted.isdisjoint(own) else [i for i in own if i in self.wanted]
        if any(known.memos[i - self.memoized] is UNRESOLVED for i in fetched):
            return False
        for index in fetched:
            self.keep(index, known.memos[index - self.memoized])
        self.hits += 1
        if self.hits > MAX_HITS:
            raise PickleProblem("the pickle holds more tensors than ckptguard reads", too_large=True)
        self.memoized = own.stop
        self.stack.append(known.value)
        return True

    def learn(self, value: object, end: int) -> None:
        """Remember the bytes since the last name, if they alone make this value."""
        start, depth, marks, memoized = self.begun
        place = (len(self.stack) - 1, len(self.marks))
        full = len(self.repeats) >= MOST or not switch.BY_HEART
        if full or (depth, marks) != place or not KEY <= end - start <= LONGEST:
            return
        raw = self.data[start:end]
        alone = _AloneMachine(raw + b".", EarlierMemo(self.kept, memoized))
        try:
            pickled = run_machine(alone, 0, _ROOM_ALONE)
        except PickleProblem:
            return
        if pickled.end == len(raw) + 1 and pickled.value == value and not pickled.persistent:
            self.repeats[raw[:KEY]] = Repeat(raw, value, tuple(map(immutable, alone.values)))

    def build(self, p: int) -> int:
        p = super().build(p)
        target = self.stack[-1]
        folded = fold(target)
        if folded is not target:
            self.stack[-1] = folded
            self.returned += _OBJECT_REFUND
            if type(folded) is TensorEntry and None not in folded.pieces:
                self.learn(folded, p)
        return p

    def reduce(self, p: int) -> int:
        p = super().reduce(p)
        sizes = _sizes(self.stack[-1])
        if sizes is not None:
            self.stack[-1] = self.shared.setdefault(sizes, sizes)
            self.returned += _SIZE_REFUND
        return p


class _AloneMachine(_FoldingMachine):
    """Reads a part of a pickle on an empty stack. From the memo it gets only earlier values that cannot change."""

    __slots__ = ("values",)

    def __init__(self, data: bytes, memo: EarlierMemo) -> None:
        super().__init__(data)
        self.kept = memo
        self.values: list[object] = []

    def memoize(self, p: int) -> int:
        self.values.append(self.stack[-1])
        return p

    def frame_end(self, p: int) -> int:
        raise PickleProblem("a frame begins in the middle of a value")

    def learn(self, value: object, end: int) -> None:
        pass
