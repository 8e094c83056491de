"""The results of a scan: digests and numbers."""

from __future__ import annotations

import msgspec

from ckptguard.formats.structure import Structure
from ckptguard.storage.protocol import Entry


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one tensor's stored elements (complex: of its components).

    - `first_bad`: the index of the first NaN or infinite element, in stored order.
    - `largest`: the largest finite magnitude (0.0 if there is none).
    - `rms`: the root mean square of the finite elements, None without any. Beyond 64 KiB it is that of a fixed sample,
      the same for every way to scan the file.
    - `zeros`: the share of the same elements with no bit set, so without negative zeros.
    - `ending`: how many elements without any bit set follow the last other one.
    - `constant`: all elements have the same bits. `zero`: all are zero, of either sign. `single_finite`: all finite
      elements have the same bits.
    """

    count: int
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    first_bad: int | None = None
    largest: float = 0.0
    rms: float | None = None
    zeros: float | None = None
    ending: int = 0
    constant: bool = False
    zero: bool = False
    single_finite: bool = False

    @property
    def recorded(self) -> tuple[float | None, float | None, float | None]:
        """What a manifest says of them: `largest`, `rms` and `zeros`, with six digits."""
        largest, rms, zeros = [n and float(f"{n:.6g}") for n in (self.largest, self.rms, self.zeros)]
        return largest, rms, zeros


class ScannedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file after the pass. `span_digests` (BLAKE3) and `pieces` align with `structure.spans`.

    `numbers` align with `structure.tensors` (None: not a float dtype, no bytes, or opaque). Only files that do not
    check themselves have `pieces`. Problems in the bytes (a wrong CRC) are in `structure.problems`, with the tensor's
    name.
    """

    entry: Entry
    structure: Structure
    envelope: str
    span_digests: tuple[str, ...]
    numbers: tuple[Numbers | None, ...]
    md5: str | None = None
    pieces: tuple[str, ...] = ()
    sums: dict[str, str] = {}  # more whole-file digests that the caller asked for: {"sha256": hex}

    def digest(self, algorithm: str) -> str | None:
        """A digest of the whole file; None if it was not taken."""
        return self.sums.get(algorithm) or (self.md5 if algorithm == "md5" else None)


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the files of a checkpoint, in the given order."""

    files: tuple[ScannedFile, ...]
    seconds: float

    def file(self, key: str) -> ScannedFile | None:
        """Return the scanned file with this key."""
        return next((f for f in self.files if f.entry.key == key), None)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How the elements of tensor `b` differ from those of tensor `a`, of the same shape.

    `differing` counts elements with other bits, or other values if the types differ. Elements that are not finite on a
    side count only in `nan_*`, `inf_*` and `became_nonfinite`. `relative_l2` is the norm of the change divided by that
    of `a` (infinite if `a` is zero). `largest_change` is the largest absolute change, at `largest_index`. These are
    None for integers, and if no element is finite on both sides. Indices are those of the tensor.
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
