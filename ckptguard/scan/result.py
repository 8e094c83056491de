"""What one pass over a file yields: digests and numbers."""

from __future__ import annotations

import msgspec

from ckptguard.formats.structure import Structure
from ckptguard.storage.protocol import Entry


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one tensor's stored elements (complex: of its components).

    `first_bad` is the index of the first NaN or infinite element in the stored order, counted from the tensor's
    first element. `largest` is the largest finite magnitude (0.0 if there is none). `constant`: all elements have
    the same bits; `zero`: all elements are zero (of either sign); `single_finite`: all finite elements have the
    same bits. `rms` is the root mean square of the finite elements: of all in up to 64 KiB, of a fixed sample in
    larger tensors; the same number however the file was scanned. None where no such element is finite. `zeros` is the
    share of the same elements that have no bit set: zeros, but for negative ones.
    """

    count: int
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    first_bad: int | None = None
    largest: float = 0.0
    rms: float | None = None
    zeros: float | None = None
    constant: bool = False
    zero: bool = False
    single_finite: bool = False


class ScannedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file after the pass. `span_digests` (BLAKE3) align with `structure.spans`, `numbers` with
    `structure.tensors` (None: not a float dtype, no bytes, or opaque). `pieces`, where a file does not check itself,
    align with `structure.spans`: see `span_pieces`. Problems found in the bytes (a wrong CRC) are already among
    `structure.problems`, with the tensor's name where a tensor was hit."""

    entry: Entry
    structure: Structure
    envelope: str
    span_digests: tuple[str, ...]
    numbers: tuple[Numbers | None, ...]
    md5: str | None = None
    pieces: tuple[str, ...] = ()
    sums: dict[str, str] = {}  # further whole-file digests that the caller asked for: {"sha256": hex}

    def digest(self, algorithm: str) -> str | None:
        """A digest of the whole file; None if it was not taken."""
        return self.sums.get(algorithm) or (self.md5 if algorithm == "md5" else None)


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the files of a checkpoint, in the order asked."""

    files: tuple[ScannedFile, ...]
    seconds: float

    def file(self, key: str) -> ScannedFile | None:
        """The scanned file under this key."""
        return next((f for f in self.files if f.entry.key == key), None)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How the elements of tensor `b` differ from those of tensor `a`, of the same shape.

    `differing` counts elements of other bits (of other values, where the types differ). Elements that are not finite
    on either side count in `nan_*`, `inf_*` and `became_nonfinite` alone: distances are those of the others.
    `relative_l2` is the norm of the change over that of `a` (infinite if `a` is zero), `largest_change` the largest
    absolute change and `largest_index` where; all None for integers, and where no element is finite on both sides.
    Indices are those of the tensor.
    """

    count: int
    differing: int
    relative_l2: float | None = None
    largest_change: float | None = None
    largest_index: tuple[int, ...] | None = None
    nan_a: int = 0
    inf_a: int = 0
    nan_b: int = 0
    inf_b: int = 0
    became_nonfinite: int = 0
    first_nonfinite: tuple[int, ...] | None = None
