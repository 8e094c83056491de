"""Compare what storage reports about a checkpoint's files now with its report when their bytes were read.

Equal signatures prove nothing. If they differ at all, the bytes are unknown until they are read again. A ctime is no
part of them: chmod, links and backups change it, so another one is no reason to doubt a checkpoint, and one to read it
before somebody trains with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckptguard.runs.sealed_content import Judged, Sealed, seen_when_sealed
from ckptguard.storage.protocol import Entry, Storage, find_entry

if TYPE_CHECKING:
    from ckptguard.values.manifest import File, Manifest, Seen


def looks_as_read(entries: Iterable[Entry], sealed: Sealed, verdict: Judged | None = None) -> bool:
    """True if storage reports the sealed files as it did when their bytes were read.

    They were read for the seal, or for this verdict. Other files may be beside them. A verdict of damage is compared
    only with the files that it saw.
    """
    as_sealed = seen_when_sealed(sealed)
    wanted = {path for path, *_ in as_sealed}
    there = {e.key: e for e in entries if e.kind == "file" and e.key in wanted}
    seen = verdict.seen if verdict is not None else ()
    of_damage = verdict is not None and verdict.place_damaged and bool(seen)
    return (not of_damage and _are_as(as_sealed, there)) or (bool(seen) and _are_as(seen, there))


def other_ctimes(entries: Iterable[Entry], sealed: Manifest) -> dict[str, int]:
    """Return the ctimes of the files whose ctime is not as when they were sealed: something happened to them."""
    known = {f.path: f.ctime_ns for f in sealed.files if f.ctime_ns is not None}
    now = {e.key: e.ctime_ns for e in entries if e.ctime_ns is not None}
    return {path: ctime for path, ctime in now.items() if known.get(path, ctime) != ctime}


def as_reported(file: File, entry: Entry) -> File:
    """Return a file of a manifest as storage describes it."""
    return replace(file, mtime_ns=entry.mtime_ns, inode=entry.inode, etag=entry.etag, ctime_ns=entry.ctime_ns)


def late_state(keys: Iterable[str], sealed: Sealed, there: Iterable[Entry] = ()) -> frozenset[str]:
    """Return the files with state, by their names, that came after the checkpoint was sealed.

    A README, a log or the results of an evaluation are none. Nor is one that is `there` because it was not yet taken
    away when the checkpoint was thinned.
    """
    known = {path for path, *_ in seen_when_sealed(sealed)}
    known |= {entry.key for entry in there if (entry.key, *entry.signature) in sealed.thinned}
    late = [key for key in keys if key not in known]
    if not late:
        return frozenset()
    # Not above: `known-good` loads these only where there are such files.
    from ckptguard.formats import tensor_suffix
    from ckptguard.formats.table import may_be_foreign
    from ckptguard.layouts.roles import file_role

    late = [key for key in late if tensor_suffix(key)]
    return frozenset(key for key in late if file_role(key) != "other" and not may_be_foreign(key))


def signature_seen(entries: Iterable[Entry], sealed: Sealed, *, damaged: bool = False) -> tuple[Seen, ...]:
    """Return how storage describes the sealed files if that or their bytes differ from the manifest, else ()."""
    listed = tuple(entries)
    if not damaged and looks_as_read(listed, sealed):
        return ()
    wanted = {path for path, *_ in seen_when_sealed(sealed)}
    return tuple((e.key, *e.signature) for e in listed if e.key in wanted)


def _are_as(known: Iterable[Seen], there: dict[str, Entry]) -> bool:
    """True if the sizes of the files and everything else that both reports contain are equal. If only one report of a
    file has such details, the files count as different."""
    before = {path: (size, reported) for path, size, *reported in known}
    if before.keys() != there.keys():
        return False
    for key, entry in there.items():
        size, reported = before[key]
        pairs = list(zip(reported, (entry.mtime_ns, entry.inode, entry.etag), strict=True))
        both = [pair for pair in pairs if None not in pair]
        if size != entry.size or any(then != now for then, now in both):
            return False
        if not both and any(pair != (None, None) for pair in pairs):
            return False
    return True


def is_same_file(listed: Entry, opened: Entry, *, local: bool) -> bool:
    """True if the opened file is the listed one, as far as storage reports.

    A store may report a different precision of the time in a listing, so an etag decides if both have one.
    """
    if local:
        return listed.signature == opened.signature
    if None not in (listed.etag, opened.etag):
        return (listed.size, listed.etag) == (opened.size, opened.etag)
    times = [time // 10**9 for time in (listed.mtime_ns, opened.mtime_ns) if time is not None]
    return listed.size == opened.size and (len(times) < 2 or times[0] == times[1])


def is_new(sealed: File, entry: Entry | None) -> bool:
    """True if the file is gone, or if storage reports that it was written again since it was sealed.

    A copy that kept its time has another inode, but nobody saved it again. Without time, inode and etag, return False.
    """
    if entry is None:
        return True
    if sealed.mtime_ns is not None and entry.mtime_ns is not None:
        return sealed.mtime_ns != entry.mtime_ns
    pairs = ((sealed.inode, entry.inode), (sealed.etag, entry.etag))
    return any(a is not None and b is not None and a != b for a, b in pairs)


def saved_over(before: Iterable[Seen], now: Iterable[Entry]) -> Iterator[tuple[Entry, int | None]]:
    """Yield the files that seem to be overwritten through their inodes, and when each was written before.

    Every hard link to such a file changed, too. A file system may also have given the inode of a deleted file to it.
    """
    known = {path: (inode, size, mtime_ns) for path, size, mtime_ns, inode, _ in before if inode is not None}
    for entry in now:
        was = known.get(entry.key)
        if was is not None and was[0] == entry.inode and was != (entry.inode, entry.size, entry.mtime_ns):
            yield entry, was[2]


def all_there(storage: Storage, files: Iterable[File]) -> bool:
    """True if all of these files exist with their sizes."""
    now = ((find_entry(storage, file.path), file) for file in files)
    return all(entry is not None and entry.size == file.size for entry, file in now)
