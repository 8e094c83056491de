"""A checkpoint as a listing shows it, and what a layout says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from ckptguard.formats.structure import Structure
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import Step


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything saved for one step. `path` is relative to the run; "." means model files at the run's root. `entries`
    are its regular files and `irregular` everything else in it (links, FIFOs, ...), keys relative to the run, sorted.
    Most lie below `path` or are `path`; a layout may own a few beside it (WeNet's ``epoch_3.yaml``). `step` is None
    where names cannot tell it."""

    path: str
    layout: str
    series: str
    step: Step
    entries: tuple[Entry, ...]
    irregular: tuple[Entry, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Keys of the regular files."""
        return tuple(e.key for e in self.entries)

    @property
    def bytes(self) -> int:
        """Total size of the regular files."""
        return sum(e.size for e in self.entries)

    @property
    def signature(self) -> tuple[tuple[object, ...], ...]:
        """Equal signatures mean that nothing the storage reports about any file has changed."""
        return tuple((e.key, *e.signature) for e in (*self.entries, *self.irregular))

    @property
    def written_at(self) -> int:
        """When the last of its files was written, in ns by the storage's clock; 0 where that is not told."""
        return max((e.mtime_ns for e in self.entries if e.mtime_ns is not None), default=0)

    def inside(self, key: str) -> str:
        """A file's name relative to the checkpoint; of a file beside it, its name."""
        if self.path == "." or key == self.path:
            return key
        if key.startswith(self.path + "/"):
            return key[len(self.path) + 1 :]
        return key.rpartition("/")[2]

    def key(self, inside: str) -> str:
        """The key of a file in the checkpoint's folder."""
        return inside if self.path == "." else f"{self.path}/{inside}"


def tops(path: str, files: Sequence[str]) -> list[str]:
    """What to move so that a checkpoint moves whole: its folder or file, and its files beside that, one by one."""
    if path == ".":
        return list(files)
    beside = [f for f in files if f != path and not f.startswith(path + "/")]
    return [path, *beside] if len(beside) < len(files) else beside


class Gap(msgspec.Struct, frozen=True):
    """Something that the layout implies and that is not there. `fatal`: the checkpoint cannot be used without it."""

    message: str
    file: str | None = None
    fatal: bool = True


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """A folder as a listing shows it. `files` are names of what lies in it directly and is no folder, `below` the
    relative paths of files in folders inside it, `around` the names of the files beside it."""

    path: str
    files: frozenset[str]
    below: frozenset[str] = frozenset()
    around: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


Structures = Mapping[str, Structure]  # of a checkpoint's files, by key


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table of layouts. Recognition is by names alone; the first row that accepts decides.

    `accepts(folder)` and `accepts_file(name, around)` (a file, and the names in its folder) say what is a checkpoint
    of this layout. `companions(name, around)` are names of files beside it that belong to it, there or not.
    `pieces(inner)` says of a folder inside (by its relative path) that it is part of the checkpoint, although its
    name looks like a checkpoint's. `gaps(checkpoint, structures)` says what is missing, from the listing and the
    structures of the files (by key); no fatal gap and no structure problem means finished, once the files are quiet.
    `last_written(path)` is the key of the file that the writer writes last ("" where there is none).
    `last_is_the_end`: with that file all others are there, and none is written again.
    `sealed_by_writer`: finished by its writer's manifest alone; an observer never seals it.
    """

    name: str
    gaps: Callable[[Checkpoint, Structures], Sequence[Gap]]
    accepts: Callable[[Folder], bool] = lambda folder: False
    accepts_file: Callable[[str, frozenset[str]], bool] = lambda name, around: False
    companions: Callable[[str, frozenset[str]], tuple[str, ...]] = lambda name, around: ()
    pieces: Callable[[str], bool] = lambda inner: False
    last_written: Callable[[str], str] = lambda path: ""
    last_is_the_end: bool = False
    sealed_by_writer: bool = False
