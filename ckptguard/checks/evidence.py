"""The input of checks: values only. A new check needs no new pass over the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from ckptguard.formats import Leaf
from ckptguard.layouts import Checkpoint, Gap
from ckptguard.scan import ScanOptions
from ckptguard.scan.result import Numbers, Scan, ScannedFile
from ckptguard.values.manifest import Manifest, Seen
from ckptguard.values.verdict import Facts, Finding


class ScannedTensor(NamedTuple):
    """One tensor of the scan, with the role that the layout gave it."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    span: int | None
    numbers: Numbers | None


class StatedSum(NamedTuple):
    """A digest that `source` states for the whole of a file. `earlier`: the source was written before the file.
    `doubtful`: such a source is not written again with the file, so a difference is a question."""

    file: str
    algorithm: str
    digest: str
    source: str
    earlier: bool = False
    doubtful: bool = False

    def differs(self, scan: Scan) -> bool:
        """Whether the file was scanned and has another digest."""
        file = scan.file(self.file)
        return file is not None and file.digest(self.algorithm) != self.digest


class FoundSums(msgspec.Struct, frozen=True):
    """What checksum files state about a checkpoint's files, the names of these lists, and what of them could not be
    used."""

    stated: tuple[StatedSum, ...] = ()
    lists: tuple[str, ...] = ()
    remarks: tuple[Finding, ...] = ()

    def added_to(self, options: ScanOptions) -> ScanOptions:
        """The options of a pass that takes these digests too."""
        algorithms = {one.algorithm for one in self.stated}
        sums = {*options.sums, *algorithms} - {"md5"}
        return msgspec.structs.replace(options, md5=options.md5 or "md5" in algorithms, sums=tuple(sorted(sums)))


NO_SUMS = FoundSums()


class KnownFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a checkpoint besides its bytes.

    - `sealed`: the manifest of this generation (None at first sight).
    - `reference`: the manifest whose keys, shapes and dtypes should match. `must_match`: the user asked for it;
      otherwise a difference is a question.
    - `previous`: the nearest lower step that training continued from, whatever its outcome.
    - `saves`: good saves before this one, the newest first, if several files were saved together.
    - `following`: the nearest checkpoint that is later by name, if known.
    - `in_run`: saved by the user's own training, not a file of unknown origin.
    - `sums`: what checksum files state, and what the hub noted of a download.
    - `vouched`: files whose digest something else states.
    - `trusted`: what nobody can read was vouched for, by the program that wrote it, a checksum or a user.
    - `thinned`: files that thinning took from it, or from what it was before others were added.
    """

    sealed: Manifest | None = None
    reference: Manifest | None = None
    reference_facts: Facts | None = None
    must_match: bool = False
    previous: Manifest | None = None
    previous_facts: Facts | None = None
    saves: tuple[Manifest, ...] = ()
    following: Manifest | None = None
    in_run: bool = True
    allow_nonfinite: tuple[str, ...] = ()
    trust_globals: tuple[str, ...] = ()
    sums: FoundSums = NO_SUMS
    vouched: frozenset[str] = frozenset()
    trusted: bool = False
    thinned: tuple[Seen, ...] = ()


class Evidence(KnownFacts, frozen=True, kw_only=True):
    """Everything known about a checkpoint when it is judged.

    `placed_digests` are digests at the places of the sealed spans, for files whose structure no longer has these spans.
    None: the file ends before.
    """

    checkpoint: Checkpoint
    scan: Scan
    roles: Mapping[str, tuple[str, ...]]
    gaps: tuple[Gap, ...] = ()
    placed_digests: Mapping[str, tuple[str | None, ...]] = {}

    def is_whole(self) -> bool:
        """True if every required file exists and is readable. Otherwise other findings say so, and missing tensors may
        be in those files."""
        present = set(self.checkpoint.files)
        broken = any(f.structure.problems or f.structure.truncated for f in self.scan.files)
        missing = any(f.path not in present for f in (self.sealed.files if self.sealed is not None else ()))
        return not broken and not missing and not any(gap.fatal for gap in self.gaps)

    def leaves(self) -> Iterator[Leaf]:
        """Yield all numbers beside tensors, of all files."""
        return (leaf for file in self.scan.files for leaf in file.structure.leaves)

    def tensors(self) -> list[ScannedTensor]:
        """Return all tensors of all files, in file order."""
        return [tensor for file in self.scan.files for tensor in self.tensors_of(file)]

    def weights(self) -> list[tuple[ScannedTensor, Numbers]]:
        """Return the model's tensors with numbers; if only an average of the weights was saved, the average's."""
        held = [(t, t.numbers) for t in self.tensors() if t.role in ("model", "ema") and t.numbers is not None]
        return [pair for pair in held if pair[0].role == "model"] or held

    def tensors_of(self, file: ScannedFile) -> list[ScannedTensor]:
        """Return the tensors of one file."""
        places = zip(file.structure.tensors, self.roles[file.entry.key], file.numbers, strict=True)
        return [ScannedTensor(file.entry.key, t.name, t.dtype, t.shape, r, t.span, n) for t, r, n in places]
