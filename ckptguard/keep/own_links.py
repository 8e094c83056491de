"""The ctimes that our own links give to files in place: they are noted, so that nobody reads these files because of
them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ckptguard.records.after_seal import note_ctimes, read_ctimes
from ckptguard.records.run import Run
from ckptguard.runs.file_signatures import other_ctimes
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.values.manifest import Manifest


@contextlib.contextmanager
def own_links_noted(run: Run, manifest: Manifest | None, paths: Iterable[str]) -> Iterator[None]:
    """Note the ctimes that files in place have after the block, in which we make or remove links to them.

    Only of files to which nothing else happened since their bytes were read, and of which only the ctime changed. Keep
    the block short: what another process does to such a file meanwhile is noted, too.
    """
    before = [] if manifest is None or run.storage.root is None else _untouched(run, manifest, paths)
    yield
    now = ((entry, find_entry(run.storage, entry.key)) for entry in before)
    ctimes = {
        old.key: new.ctime_ns
        for old, new in now
        if new is not None and new.ctime_ns is not None and new.signature == old.signature and new != old
    }
    if manifest is not None and ctimes:
        note_ctimes(run, manifest.id, ctimes)


def _untouched(run: Run, manifest: Manifest, paths: Iterable[str]) -> list[Entry]:
    """Return the files in place to which nothing happened since their bytes were read."""
    there = [entry for path in paths if (entry := find_entry(run.storage, path)) is not None]
    other = other_ctimes(there, manifest)
    noted = read_ctimes(run, manifest.id) if other else {}
    return [entry for entry in there if entry.key not in other or noted.get(entry.key) == entry.ctime_ns]
