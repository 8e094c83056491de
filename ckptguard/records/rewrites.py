"""What rollbacks rewrote of the user's: the old and the new content of pointers and links, written before they change.

Undoing a rollback puts the old content back from here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from ckptguard.records.run import Run, create_record, list_records, read_sound, write_once
from ckptguard.records.who_and_when import dated_name
from ckptguard.values.ids import RECORDS_FOLDER, is_safe_path
from ckptguard.values.record_formats import PLAIN

FOLDER = "rewrites"


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """One pointer: its whole text, or the target of a link. `mode` and `mtime_ns` are those of the old file."""

    key: str
    link: bool
    old: str
    new: str
    mode: int | None = None
    mtime_ns: int | None = None


class Rewrites(msgspec.Struct, frozen=True, kw_only=True):
    """All pointers that one rollback rewrites."""

    format: int = PLAIN.writes
    name: str
    at: str
    pointers: tuple[Rewrite, ...]


def record_rewrites(run: Run, pointers: Sequence[Rewrite]) -> None:
    """Record what is about to be rewritten. Nothing may be rewritten before this returns."""
    name, now = dated_name()
    create_record(run, f"{FOLDER}/{name}.json", Rewrites(name=name, at=now, pointers=tuple(pointers)))


def mark_undone(run: Run, rewrites: Rewrites) -> None:
    """Record that the old content is back."""
    write_once(run, f"{FOLDER}/{rewrites.name}.undone")


def last_rewrites(run: Run) -> Rewrites | None:
    """Return the newest record that was not undone and can be read, or None."""
    names = list_records(run, FOLDER)
    return next((found for found in _newest_first(run, names) if f"{found.name}.undone" not in names), None)


def all_rewrites(run: Run) -> Iterator[Rewrite]:
    """Yield every pointer that a rollback began to rewrite, as far as the records can be read."""
    for found in _newest_first(run, list_records(run, FOLDER)):
        yield from found.pointers


def _newest_first(run: Run, names: Collection[str]) -> Iterator[Rewrites]:
    for name in sorted((n.removesuffix(".json") for n in names if n.endswith(".json")), reverse=True):
        found = read_sound(run, f"{FOLDER}/{name}.json", Rewrites, "the record of rewritten pointers")
        if found is not None and found.name == name and all(_is_users(one.key) for one in found.pointers):
            yield found


def _is_users(key: str) -> bool:
    return is_safe_path(key) and key.split("/")[0] != RECORDS_FOLDER
