"""A checkpoint as a listing shows it, and what a layout knows about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from ckptguard.formats.structure import Structure
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import Step


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything saved for one step. `path` is relative to the run; "." means model files at the run's root.

    `entries` are its regular files, `irregular` everything else in it (links, FIFOs, folders that cannot be listed).
    Their keys are relative to the run and sorted. Most are at or below `path`; a layout may own a few beside it
    (WeNet's ``epoch_3.yaml``). `step` is None if the name does not state it. `asked` are the plugins that were asked
    about it, each with why it gave no answer, and `missing` the files that it lacks by their answers. `claimed`: only
    a plugin says that these files are a checkpoint.
    """

    path: str
    layout: str
    series: str
    step: Step
    entries: tuple[Entry, ...]
    irregular: tuple[Entry, ...] = ()
    missing: tuple[str, ...] = ()
    asked: tuple[tuple[str, str], ...] = ()
    claimed: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        """Keys of the regular files."""
        return tuple(e.key for e in self.entries)

    @property
    def unread(self) -> str | None:
        """Why it cannot be read, if it is, or has, a folder that cannot be listed. Then it has no verdict."""
        return next((e.target for e in self.irregular if e.kind == "unread"), None)

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
        """When the last of its files was written, in ns by the storage's clock; 0 if unknown."""
        return max((e.mtime_ns for e in self.entries if e.mtime_ns is not None), default=0)

    def inside(self, key: str) -> str:
        """Return a file's name relative to the checkpoint; for a file beside it, its name."""
        if self.path == "." or key == self.path:
            return key
        if key.startswith(self.path + "/"):
            return key[len(self.path) + 1 :]
        return key.rpartition("/")[2]

    def key(self, inside: str) -> str:
        """Return the key of a file in the checkpoint's folder."""
        return inside if self.path == "." else f"{self.path}/{inside}"


def tops(path: str, files: Sequence[str]) -> list[str]:
    """Return what to move so that a checkpoint moves as a whole: its folder or file, and each file beside it."""
    if path == ".":
        return list(files)
    beside = [f for f in files if f != path and not f.startswith(path + "/")]
    return [path, *beside] if len(beside) < len(files) else beside


class Gap(msgspec.Struct, frozen=True):
    """Something that the layout implies and that is missing. `fatal`: the checkpoint cannot be used without it."""

    message: str
    file: str | None = None
    fatal: bool = True


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """A folder as a listing shows it. `files` are the names directly in it, without folders.

    `below` are relative paths of files in its subfolders, `around` the names of the files beside it. `holds_saves`:
    some of its files are on record as saves of their own.
    """

    path: str
    files: frozenset[str]
    below: frozenset[str] = frozenset()
    around: frozenset[str] = frozenset()
    holds_saves: bool = False

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


Structures = Mapping[str, Structure]  # of a checkpoint's files, by key


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table of layouts. Names alone decide, and the first row that accepts wins.

    - `accepts(folder)`, `accepts_file(name, around)`: is this folder or file a checkpoint of the layout?
    - `companions(name, around)`: names of files beside it that belong to it, whether they exist or not.
    - `pieces(inner)`: is this folder inside a part of it, although it is named like a checkpoint?
    - `gaps(checkpoint, structures)`: what is missing. No fatal gap and no structure problem in quiet files means
      finished.
    - `last_written(path)`: the key of the file that is written last, or "".
    - `last_is_the_end`: once that file exists, all others exist and none is written again.
    - `sealed_by_writer`: only its writer's manifest finishes it; an observer never seals it.
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
