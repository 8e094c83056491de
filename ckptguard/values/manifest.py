"""The manifest: the content of a checkpoint, byte by byte. It is written last, and writing it is the commit.

Spans and tensors are JSON arrays, so that a checkpoint with 100 000 tensors stays readable and small. Digests are
lower-case hexadecimal. `docs/reference/records.md` specifies the text.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import msgspec

from ckptguard.errors import RecordsError
from ckptguard.values.ids import RECORDS_FOLDER, CheckpointId, Step, is_safe_path
from ckptguard.values.record_formats import MANIFEST
from ckptguard.values.record_text import decode_checked, encode_checked

# An older version sees only bytes in files of these formats. So their `envelope` is the digest of all bytes, and their
# spans and tensors have fields of their own in the text. A new format with tensors must be one of them, or each version
# calls bad what the other has sealed.
BY_PLUGIN = "plugin"  # whatever a plugin read; the verdict names it
WHOLE_FORMATS = frozenset(("zip", "tar", "gguf", "hdf5", BY_PLUGIN))
_LARGEST = 2**64 - 1  # an inode may be this large


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stored range of bytes that holds tensor data."""

    offset: int
    length: int
    blake3: str


Seen = tuple[str, int, int | None, int | None, str | None]  # path, size, mtime, inode and etag of a file


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One named tensor. `span` is the index in its file's spans (None: no bytes in the file).

    `largest` is the largest finite magnitude, `rms` the root mean square (of a sample in large tensors), and `zeros`
    the share of zeros. They have six digits. They are None for types other than floats, and if the writer sealed
    without a scan.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    span: int | None
    role: str
    largest: float | None = None
    rms: float | None = None
    zeros: float | None = None


class Counter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A checkpoint's own statement of its place in the training: `kind` (``global_step``, ``epoch``, ...) and `value`.

    `source` is the file and key that state it.
    """

    kind: str
    value: int
    source: str


class File(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stored file (shard) of a checkpoint. `path` is relative to the run.

    `envelope` is the BLAKE3 of all bytes outside spans, in file order; in files of `WHOLE_FORMATS` of all bytes.
    `mtime_ns`, `inode` and `etag` are the storage's report when the manifest was written. They only help to distinguish
    a re-save from damage, and never prove identity. `ctime_ns` only says whether something happened to the file since.
    """

    path: str
    size: int
    format: str
    envelope: str
    md5: str | None = None
    mtime_ns: int | None = None
    inode: int | None = None
    etag: str | None = None
    ctime_ns: int | None = None
    spans: tuple[Span, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    globals: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # tied names that the file states without storing them again
    checksums: str = ""  # a digest of what a torch archive states about its own records
    pieces: tuple[str, ...] = ()  # CRC-32s of some pieces of each span, if the file does not check itself
    inner_spans: tuple[Span, ...] = ()  # only in the text: the spans of a file of `WHOLE_FORMATS`
    inner_tensors: tuple[Tensor, ...] = ()

    @property
    def signature(self) -> tuple[int, int | None, int | None, str | None]:
        """How storage described it when the manifest was written, in the form of an entry's signature."""
        return self.size, self.mtime_ns, self.inode, self.etag


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation of one checkpoint. `path` and all file paths are relative to the run."""

    # 1: a step is one number or none, and there are no counters. Release 0.1 did not state it: there it is 2. By a
    # factory, because a default would be omitted.
    format: int = msgspec.field(default_factory=lambda: 2)
    series: str
    path: str
    layout: str
    step: Step
    generation: int
    digest_origin: str  # "writer" | "observer"
    sealed_at: str
    version: str
    nonce: str
    files: tuple[File, ...]
    metrics: dict[str, float] = {}  # the finite numbers that were given with the save
    nonfinite_metrics: dict[str, str] = {}  # the others, as words: "nan", "inf", "-inf"
    counters: tuple[Counter, ...] = ()  # the finest first
    first_saved_ns: int | None = None  # in a replica: when its run had saved it
    # Files of a generation before it that were taken away, because only a resume needs them: path, size, mtime,
    # inode and etag of each. The others are the same files, with the same bytes.
    thinned: tuple[Seen, ...] = ()

    @property
    def saved_at(self) -> int | None:
        """When it was saved, in ns by the clock of the storage that it was saved to. None if unknown."""
        if self.first_saved_ns is not None:
            return self.first_saved_ns
        return max((f.mtime_ns for f in self.files if f.mtime_ns is not None), default=None)

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint."""
        return CheckpointId(self.series, self.step, self.generation)

    @property
    def training_step(self) -> int | None:
        """How many updates training had made: the number in its name, or a counter inside other than an epoch; else
        None."""
        if isinstance(self.step, int):
            return self.step
        return next((c.value for c in self.counters if not c.kind.startswith("epoch")), None)

    def given_metrics(self) -> dict[str, float]:
        """Return all numbers that were given with the save."""
        return {**self.metrics, **{name: float(word) for name, word in self.nonfinite_metrics.items()}}

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(f.size for f in self.files)

    def file(self, path: str) -> File | None:
        """Return the file with this path, or None."""
        return next((f for f in self.files if f.path == path), None)


def split_metrics(given: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Split named numbers for a manifest: the finite ones, and the others as words, which JSON lacks."""
    finite = {name: float(value) for name, value in given.items() if math.isfinite(value)}
    return finite, {name: str(float(value)) for name, value in given.items() if name not in finite}


def identity(files: tuple[File, ...]) -> tuple[tuple[object, ...], ...]:
    """Return what makes two contents equal: paths, sizes and BLAKE3 digests, never times or MD5."""
    within = ((f, () if f.format in WHOLE_FORMATS else f.spans) for f in files)
    return tuple(
        sorted(
            (f.path, f.size, f.envelope, tuple((s.offset, s.length, s.blake3) for s in spans)) for f, spans in within
        )
    )


def content_digest(files: tuple[File, ...]) -> str:
    """Return the digest of a content in 32 hexadecimal digits, by which a verdict names it."""
    return hashlib.blake2b(msgspec.json.encode(identity(files)), digest_size=16).hexdigest()


def bytes_digest(files: tuple[File, ...]) -> str:
    """Return a digest of the bytes alone: equal for a content under another name."""
    return hashlib.blake2b(
        msgspec.json.encode(sorted(part[1:] for part in identity(files))), digest_size=16
    ).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the text of a manifest, which `decode_manifest` reads."""
    if any(f.format in WHOLE_FORMATS for f in manifest.files):
        manifest = _moved(manifest, {"inner_spans": "spans", "inner_tensors": "tensors"})
    return encode_checked(manifest)


def _moved(manifest: Manifest, fields: Mapping[str, str]) -> Manifest:
    """Return the manifest with these fields of files of `WHOLE_FORMATS` set from others, which become empty."""
    files = [
        msgspec.structs.replace(
            f, **{to: getattr(f, source) for to, source in fields.items()}, **dict.fromkeys(fields.values(), ())
        )
        if f.format in WHOLE_FORMATS and any(getattr(f, source) for source in fields.values())
        else f
        for f in manifest.files
    ]
    return msgspec.structs.replace(manifest, files=tuple(files))


def decode_manifest(text: bytes) -> Manifest:
    """Parse and check a manifest. Raises RecordsError if it is damaged, has a newer format, or names unsafe paths."""
    manifest = decode_checked(text, Manifest, "a manifest")
    if any(f.format in WHOLE_FORMATS for f in manifest.files):
        manifest = _moved(manifest, {"spans": "inner_spans", "tensors": "inner_tensors"})
    if manifest.format > MANIFEST.reads:
        raise RecordsError(
            f"a manifest has format {manifest.format}; this version reads up to {MANIFEST.reads}",
            hint="upgrade ckptguard",
        )
    paths = [f.path for f in manifest.files] + [path for path, *_ in manifest.thinned]
    paths += [manifest.path] * (manifest.path != ".")
    for path in paths:
        if not is_safe_path(path) or path.split("/")[0] == RECORDS_FOLDER:
            raise RecordsError(f"a manifest names an unsafe path: {path!r}")
    if not {"nan", "inf", "-inf"}.issuperset(manifest.nonfinite_metrics.values()):
        raise RecordsError("a manifest states a metric that is not a number")
    if any(n < 0 for f in manifest.files for n in (f.size, *(n for s in f.spans for n in (s.offset, s.length)))):
        raise RecordsError("a manifest states a negative size or offset")
    stated = (n for f in manifest.files for n in (f.size, f.mtime_ns or 0, f.inode or 0, f.ctime_ns or 0))
    others = (manifest.first_saved_ns or 0, *(c.value for c in manifest.counters))
    if any(not -_LARGEST // 2 <= n <= _LARGEST for n in (*stated, *others)):
        raise RecordsError("a manifest states a number that is too large")
    if any(t.span is not None and not 0 <= t.span < len(f.spans) for f in manifest.files for t in f.tensors):
        raise RecordsError("a manifest's tensor refers to a span that does not exist")
    return manifest
