"""What a format's reader learns about one file, without reading its tensor bytes.

All values are msgspec structs, because they travel between the scanning process and the judging one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from ckptguard.storage.protocol import Entry


def is_count(value: object) -> bool:
    """True if it is a size or an offset that a file can have."""
    return type(value) is int and 0 <= value < 2**63


class ReadProblem(ValueError):
    """The data is not what it should be; the message says why.

    `ends_early`: it stops in the middle. `too_large`: it is more than is read here, and nothing is known to be wrong.
    """

    def __init__(self, message: str, *, ends_early: bool = False, too_large: bool = False) -> None:
        super().__init__(message)
        self.ends_early, self.too_large = ends_early, too_large


class Source(Protocol):
    """The part of a `Reader` that is needed to read an archive in a file, or in a part of one."""

    @property
    def entry(self) -> Entry: ...

    def read(self, offset: int, length: int) -> bytes: ...


MAX_PROBLEMS = 200  # that are listed for one file


class SpanPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where tensor bytes are in the file; `crc32` if the container states one."""

    offset: int
    length: int
    crc32: int | None = None


class TensorPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One named tensor. Its elements are within elements `start`..`stop` of span number `span`.

    `dtype` is torch's name without the prefix ("bfloat16", "float8_e4m3fn", "int64", ...), or the file's own word for
    an unknown dtype: such tensors are opaque bytes. `span` is None without stored bytes. `role` is "" until a layout
    assigns one. `byte_order` is "little" or "big". `strides` (in elements) are set only if the elements are not
    `start`..`stop` in row-major order (a transposed view, a slice).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    span: int | None
    start: int = 0
    stop: int = 0
    role: str = ""
    byte_order: str = "little"
    strides: tuple[int, ...] = ()


BYTES = ("uint8", "int8")


def holds_bytes(tensor: TensorPlace) -> bool:
    """True if a tensor is a row of bytes, which may hold a file."""
    return tensor.dtype in BYTES and not tensor.strides and sum(size != 1 for size in tensor.shape) <= 1


class Problem(msgspec.Struct, frozen=True):
    """Something wrong with the file's structure, in one sentence.

    `doubt`: it may load, but nobody knows whether it does, or gives the numbers that were read.
    """

    message: str
    tensor: str | None = None
    expected: str | None = None
    found: str | None = None
    doubt: bool = False


class Leaf(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One number outside tensors (a learning rate, a loss scale, a step counter), by its dotted path.

    `of_array`: it is an element that is not finite, of a numpy array inside the pickle. `dimensions` of that array: 2
    if they are unknown. `beside`: the dict that holds it directly holds a matrix of floats, too.
    """

    name: str
    value: float | int | bool
    of_array: bool = False
    dimensions: int = 2
    beside: bool = False


class ChunkPlace(msgspec.Struct, frozen=True, array_like=True):
    """A stored range that another file explains: one piece of a tensor, or (dtype "") a pickled Python object.

    `offsets` and `shape` say where the piece belongs in its tensor, `whole` that it is all of it. `packed`: the bytes
    were compressed or otherwise transformed, so that nothing in them can be read.
    """

    offset: int
    length: int
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    whole: bool = True
    packed: bool = False


class RangeSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stored range whose CRC-32 the container states. It may hold spans, and no range overlaps another."""

    offset: int
    length: int
    crc32: int
    name: str


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """The structure of one file. Without `problems` it is whole, readable in its format, and understood.

    - `spans`: sorted by offset, without overlaps, inside the file.
    - `tensors`: in file order; several may share a span.
    - `globals`: the dotted names in the file's pickles, sorted.
    - `weight_map`: a Hugging Face index (tensor -> file name). `metadata`: a safetensors header's own map.
    - `truncated`: the file ends before its own structure does, and may still be being written.
    - `containers`: the top-level keys whose values hold values. A dotted name shows nesting only together with them.
    - `unread`: names of what may hold floats that could not be read.
    - `chunks`: the ranges in other files that this file describes, by file name, sorted by offset, without overlaps.
    - `members`: the files inside an archive that were read. Names of what they hold begin with theirs and a colon.
    - `not_understood`: names of parts that hold state, or may, in a form that nobody here reads.
    - `sums`: ranges with a checksum, sorted by offset.
    - `learnt`: names of tensors that require a gradient, and of the state dicts of torch's modules.
    - `matrices`: the places of numpy's matrices of floats, by the first two parts of their names.
    - `scores`: names of tensors of one float in a dict that directly holds no matrix of floats, outside optimizers.
    - `checksums`: a digest of what an archive states about its content (names, sizes, CRC-32s), if it states all of it.
    - `plugin`: the plugin that read the file, and its version; "" if a format of ours did.
    """

    format: str
    spans: tuple[SpanPlace, ...] = ()
    tensors: tuple[TensorPlace, ...] = ()
    problems: tuple[Problem, ...] = ()
    truncated: bool = False
    globals: tuple[str, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    metadata: dict[str, str] = {}
    weight_map: dict[str, str] | None = None
    containers: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    chunks: dict[str, tuple[ChunkPlace, ...]] = {}
    checksums: str = ""
    members: tuple[str, ...] = ()
    not_understood: tuple[str, ...] = ()
    sums: tuple[RangeSum, ...] = ()
    learnt: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    plugin: str = ""

    @property
    def is_broken(self) -> bool:
        """True if it is not whole, or cannot be read in its format."""
        return any(not problem.doubt for problem in self.problems)


def broken(name: str, message: str, *, truncated: bool = False, names: frozenset[str] = frozenset()) -> Structure:
    """Return the structure of an unusable file of the format `name`, with the reason."""
    problems = (Problem(message),)
    return Structure(format=name, problems=problems, truncated=truncated, globals=tuple(sorted(names)))


def unread(name: str, error: ReadProblem, *, names: frozenset[str] = frozenset()) -> Structure:
    """Return the structure of a file of the format `name` that could not be read: broken, or too large to tell."""
    if not error.too_large:
        return broken(name, str(error), truncated=error.ends_early, names=names)
    return Structure(format=name, not_understood=(f"what it holds ({error})",), globals=tuple(sorted(names)))


def shortened(problems: list[Problem], most: int, what: str = "problems") -> tuple[Problem, ...]:
    """Return at most this many problems, and one with the number of the others."""
    more = len(problems) - most
    return (*problems[:most], *([Problem(f"and {more} more {what}")] if more > 0 else ()))


class Found(msgspec.Struct):
    """What a reader has found in a file so far."""

    spans: list[SpanPlace] = []
    tensors: list[TensorPlace] = []
    problems: list[Problem] = []
    leaves: list[Leaf] = []
    names: set[str] = set()  # the globals
    unread: list[str] = []
    containers: tuple[str, ...] = ()
    truncated: bool = False
    unlisted: int = 0  # problems
    learnt: list[str] = []
    matrices: list[str] = []
    scores: list[str] = []
    not_understood: list[str] = []

    def add(self, problem: Problem) -> None:
        """Add a problem; beyond a limit only count it."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)
        else:
            self.unlisted += 1

    def fail(self, part: str, error: ReadProblem, tensor: str | None = None) -> None:
        """Note that a part cannot be read: a problem, unless it is only too large."""
        if error.too_large:
            self.not_understood.append(f"{part} ({error})")
        else:
            self.add(Problem(f"{part} cannot be read: {error}", tensor=tensor))

    def structure(self, name: str, most: int | None = None) -> Structure:
        """Return the structure for the format `name`, with at most this many problems."""
        more = (Problem(f"and {self.unlisted} more problems"),) if self.unlisted else ()
        return Structure(
            format=name,
            spans=tuple(self.spans),
            tensors=tuple(self.tensors),
            problems=(*self.problems, *more) if most is None else shortened(self.problems, most),
            truncated=self.truncated,
            globals=tuple(sorted(self.names)),
            leaves=tuple(self.leaves),
            containers=self.containers,
            unread=tuple(self.unread),
            not_understood=tuple(self.not_understood[:MAX_PROBLEMS]),
            learnt=tuple(self.learnt),
            matrices=tuple(self.matrices),
            scores=tuple(self.scores),
        )


Beside = Callable[[str], "Structure | None"]  # a file's name -> the structure of that file in the same folder, if any


class Format(msgspec.Struct, frozen=True):
    """One row of the table of formats.

    - `matches(path, head)`: checks the file's name and first bytes.
    - `module`, below `ckptguard.formats`: imported for the first file of the format. Its function `read` takes (reader,
      path), returns a Structure for any bytes, and raises only the reader's errors.
    - `explained_beside`: only another file beside it explains such a file, so the function also takes `beside`.
    - `suffixes`: usual ends of names, in lower case; several rows may share one.
    - `unsummed`: such files hold numbers, and state no checksum of them.
    - `holds`: the contents that the name promises: tensors of a checkpoint, arrays, objects or pieces. Arrays are often
      data beside a checkpoint. Objects may be anything. Another file explains pieces.
    """

    name: str
    matches: Callable[[str, bytes], bool]
    module: str
    read: str = "read"
    explained_beside: bool = False
    unsummed: bool = False
    suffixes: tuple[str, ...] = ()
    holds: Literal["tensors", "arrays", "objects", "pieces"] = "tensors"
