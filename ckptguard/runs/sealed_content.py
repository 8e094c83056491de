"""Decide whether sealed content is good, and whether a kept copy is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ckptguard.decisions.known_good import SeriesHead
from ckptguard.records.kept import KeptCopy
from ckptguard.records.run import Run
from ckptguard.values.manifest import Manifest, Seen
from ckptguard.values.verdict import Outcome, Verdict

Digest = bytes


class SealedAs(msgspec.Struct, frozen=True, array_like=True):
    """The part of a manifest that says what was sealed, where and when. Nothing is verified with it.

    If the file signatures were left out, `looked` is their digest. `content` is that of the bytes. `ranks` is how many
    ranks its files name. `has_md5`: it has the MD5 of every file. `thinned` are the files that were taken
    from it.
    """

    path: str
    layout: str
    bytes: int
    files: tuple[Seen, ...]
    looked: Digest
    series_head: SeriesHead
    metrics: dict[str, float]
    saved_at: float | None
    content: str
    ranks: int | None
    has_md5: bool
    thinned: tuple[Seen, ...] = ()


class JudgedAs(msgspec.Struct, frozen=True, array_like=True):
    """The part of a verdict that a listing shows, and the signatures that it saw, or with `looked` their digest.
    `number` is that in its name."""

    number: int
    outcome: Outcome
    checked_at: str
    place_damaged: bool
    content: Outcome | None
    reason: str
    seen: tuple[Seen, ...]
    looked: Digest
    world_size: int | None


Sealed = Manifest | SealedAs
Judged = Verdict | JudgedAs


def seen_when_sealed(sealed: Sealed) -> Sequence[Seen]:
    """Return how storage described the files when they were sealed."""
    if isinstance(sealed, SealedAs):
        return sealed.files
    return [(f.path, f.size, f.mtime_ns, f.inode, f.etag) for f in sealed.files]


def sealed_outcome(verdict: Judged) -> Outcome | None:
    """Return the verdict's outcome for the sealed bytes. For damaged files in place that is the outcome before."""
    return verdict.content if verdict.place_damaged else verdict.outcome


def made_of_sealed(copy: KeptCopy, manifest: Sealed) -> bool:
    """True if a kept copy holds the sealed content: made of the sealed files, or read and right. A copy that a save
    raced with holds another content."""
    if len(copy.read_at) == len(copy.files):
        return True
    made_of = dict(zip(copy.files, copy.sources, strict=False))
    for path, *known in seen_when_sealed(manifest):
        if path not in made_of or (known[1:] != [None, None, None] and made_of[path] != tuple(known)):
            return False
    return True


def kept_matches(run: Run, copy: KeptCopy, manifest: Sealed) -> bool:
    """True if a kept copy was made of exactly the sealed files, and exists with the sealed sizes.

    Its bytes are not read. A hard link that was written or touched since it was read has another time.
    """
    return made_of_sealed(copy, manifest) and is_untouched(
        run, copy, {path: size for path, size, *_ in seen_when_sealed(manifest)}
    )


def is_untouched(run: Run, copy: KeptCopy, sizes: Mapping[str, int]) -> bool:
    """True if these files of a kept copy have these sizes, and hard links keep their recorded times."""
    made_of = dict(zip(copy.files, copy.sources, strict=False))
    read_at = dict(zip(copy.files, copy.read_at, strict=False))
    there = {entry.key: entry for entry in run.records.list(copy.folder, recursive=True)}
    for path, size in sizes.items():
        entry, (_, mtime_ns, inode, _) = there.get(copy.key(path)), made_of[path]
        if entry is None or entry.size != size:
            return False
        is_source = copy.how == "link" and entry.inode == inode is not None
        if is_source and entry.mtime_ns not in (mtime_ns, read_at.get(path, mtime_ns)):
            return False
    return True
