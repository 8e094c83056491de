"""Unchanged: do a checkpoint's files still look as they did when they were sealed?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptguard.layouts import Checkpoint
from ckptguard.storage.protocol import Entry, Storage, find_entry
from ckptguard.values.manifest import File, Manifest
from ckptguard.values.verdict import Verdict

Seen = tuple[str, int, int | None, int | None, str | None]


def looks_unchanged(checkpoint: Checkpoint, manifest: Manifest, verdict: Verdict | None = None) -> bool:
    """Whether all sealed files have the sizes, times and inodes of the manifest, or those under which the verdict found
    their bytes unchanged; others may be beside them. Bytes that rot under equal times are found by verifying."""
    entries = {e.key: e for e in checkpoint.entries}
    return _are_there(manifest.files, entries) or (
        verdict is not None
        and {path for path, *_ in verdict.seen} >= {f.path for f in manifest.files}
        and _are_there([_as_seen(*signature) for signature in verdict.seen], entries)
    )


def signature_seen(checkpoint: Checkpoint, manifest: Manifest) -> tuple[Seen, ...]:
    """How the storage describes the sealed files, where that is not as in the manifest."""
    if looks_unchanged(checkpoint, manifest):
        return ()
    sealed = {f.path for f in manifest.files}
    return tuple((e.key, *e.signature) for e in checkpoint.entries if e.key in sealed)


def _are_there(files: Sequence[File], entries: Mapping[str, Entry]) -> bool:
    there = all(f.path in entries and f.size == entries[f.path].size for f in files)
    return there and not any(is_new(f, entries[f.path]) for f in files)


def _as_seen(path: str, size: int, mtime_ns: int | None, inode: int | None, etag: str | None) -> File:
    return File(path=path, size=size, format="", envelope="", mtime_ns=mtime_ns, inode=inode, etag=etag)


def is_new(sealed: File, entry: Entry | None) -> bool:
    """Whether the storage says that a file was written again since it was sealed (or is gone). A copy that kept its
    time has another inode, but nobody saved it again. What has neither on record cannot be told to be new."""
    if entry is None:
        return True
    if sealed.mtime_ns is not None and entry.mtime_ns is not None:
        return sealed.mtime_ns != entry.mtime_ns
    pairs = ((sealed.inode, entry.inode), (sealed.etag, entry.etag))
    return any(a is not None and b is not None and a != b for a, b in pairs)


def saved_over(before: Iterable[Seen], now: Iterable[Entry]) -> bool:
    """Whether a file was written again through its inode since: by then every hard link to it had changed, too."""
    known = {path: (inode, size, mtime_ns) for path, size, mtime_ns, inode, _ in before if inode is not None}
    there = ((known.get(e.key), (e.inode, e.size, e.mtime_ns)) for e in now)
    return any(was is not None and was[0] == is_[0] and was != is_ for was, is_ in there)


def seen_when_sealed(manifest: Manifest) -> list[Seen]:
    """How the storage described the files when they were sealed."""
    return [(f.path, f.size, f.mtime_ns, f.inode, f.etag) for f in manifest.files]


def all_there(storage: Storage, files: Iterable[File]) -> bool:
    """Whether all of these files are there now, with their sizes."""
    now = ((find_entry(storage, file.path), file) for file in files)
    return all(entry is not None and entry.size == file.size for entry, file in now)
