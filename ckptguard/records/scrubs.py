"""When each place of a generation was last read again. The name of a record contains everything."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Mapping

import msgspec

from ckptguard.errors import CouldNotTellError
from ckptguard.records.run import Run, list_records, read_sound, write_once
from ckptguard.values.ids import CheckpointId, id_from_record
from ckptguard.values.record_formats import PLAIN

FOLDER = "scrubs"
IN_PLACE, KEPT = "place", "kept"
_NAME = re.compile(
    r"(?P<id>[\d-]+\.\d+)\.(?P<place>[a-z][a-z0-9-]*)\.(?P<began>\d{8}T\d{6}Z)\.(?P<done>\d{1,9})-(?P<files>\d{1,9})\.json"
)
_TIME = "%Y%m%dT%H%M%SZ"

Where = tuple[CheckpointId, str]  # and the place


class Scrub(msgspec.Struct, frozen=True, kw_only=True):
    """One reading. `done` of its `files`, in the manifest's order, were as sealed; or all were read, and the ledger has
    the result. `began` is in seconds since 1970."""

    id: CheckpointId
    place: str
    began: float
    done: int
    files: int

    @property
    def where(self) -> Where:
        """The id and the place."""
        return self.id, self.place

    @property
    def is_whole(self) -> bool:
        """True if nothing is left to read."""
        return self.done >= self.files

    @property
    def key(self) -> str:
        """The record's key."""
        began = datetime.datetime.fromtimestamp(self.began, datetime.UTC).strftime(_TIME)
        return f"{FOLDER}/{self.id.record_path}.{self.place}.{began}.{self.done}-{self.files}.json"


def read_scrubs(run: Run) -> list[Scrub]:
    """Return all records, from one listing of names."""
    found = (parse_scrub(key) for key in list_records(run, FOLDER, recursive=True, with_content=True))
    return [scrub for scrub in found if scrub is not None]


def newest_scrubs(scrubs: list[Scrub], now: float) -> dict[Where, Scrub]:
    """Return the record that counts for each place: the latest that is not in the future, then the one with most
    files."""
    newest: dict[Where, Scrub] = {}
    for scrub in scrubs:
        known = newest.get(scrub.where)
        if scrub.began <= now + 1 and (known is None or (known.began, known.done) < (scrub.began, scrub.done)):
            newest[scrub.where] = scrub
    return newest


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    md5: dict[str, str] = {}  # of the files that an interrupted reading has behind it, by path


def read_md5s_so_far(run: Run, scrub: Scrub) -> dict[str, str]:
    """Return the MD5s that an interrupted reading took, by path."""
    found = read_sound(run, scrub.key, _Content, "the record of a reading")
    return {} if found is None else found.md5


def record_scrub(run: Run, scrub: Scrub, *, before: list[Scrub], md5s: Mapping[str, str]) -> None:
    """Record a reading, and remove the known older ones of the same place. After a kill in between both exist."""
    content = {"format": PLAIN.writes, "digests": ("blake3",)}
    so_far = {"md5": dict(md5s)} if md5s and not scrub.is_whole else {}
    write_once(run, scrub.key, content | so_far)  # two concurrent readings read the same
    forget_scrubs(run, [old for old in before if old.where == scrub.where and old.key != scrub.key])
    before[:] = [old for old in before if old.where != scrub.where] + [scrub]


def forget_scrubs(run: Run, scrubs: list[Scrub]) -> None:
    """Remove outdated records. One that cannot be removed does no harm."""
    for scrub in scrubs:
        with contextlib.suppress(CouldNotTellError):
            run.records.remove(scrub.key)


def parse_scrub(key: str) -> Scrub | None:
    """Return the reading that a key below the folder is about, or None."""
    folder, _, name = key.partition("/")
    match = _NAME.fullmatch(name)
    id = id_from_record(folder, match["id"]) if match else None
    if match is None or id is None:
        return None
    try:
        began = datetime.datetime.strptime(match["began"], _TIME).replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:
        return None
    scrub = Scrub(id=id, place=match["place"], began=began, done=int(match["done"]), files=int(match["files"]))
    return scrub if scrub.key == f"{FOLDER}/{key}" else None
