"""Which keys are those of records. Where the records are not in the run, a user's files may be beside them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ckptguard.errors import ObjectMissingError
from ckptguard.storage.protocol import Entry, Storage
from ckptguard.values.record_formats import FORMAT_KEY
from ckptguard.values.temporary_names import LEFT_IN_RECORDS

IGNORE_KEY, IGNORE_TEXT = ".gitignore", b"*\n"
WHOSE_KEY = "run.json"  # for records outside the run

# Their keys. docs/reference/records.md has the same.
_SINGLE = frozenset(
    (IGNORE_KEY, "daemon.json", FORMAT_KEY, "gate.lock", "lineage.json", "lock", "room.json", WHOSE_KEY)
)
_LOCKS = frozenset(("lock", "gate.lock"))  # which are empty
_ID = r"[A-Za-z0-9._#=%~-]+/(?:-|\d{12}(?:-\d{12})*)\.\d+"
_DATED = r"\d{8}T\d{6}-[0-9a-f]{8}"
_OF_ID = re.compile(rf"{_ID}(?:\.[^/]+)?\.json")
_FILES_OF_ID = re.compile(
    rf"{_ID}(?:\.json|\.damaged\.json|\.moved|\.taken|(?:\.damaged-[0-9a-f]{{8}})?/.+)", re.DOTALL
)
_KEYS = {
    **dict.fromkeys(("ctimes", "emptied", "ledger", "manifests", "md5", "metrics", "reference", "scrubs"), _OF_ID),
    **dict.fromkeys(("kept", "quarantine", "trash"), _FILES_OF_ID),
    "audit": re.compile(rf"{_DATED}\.(?:began|ended)\.json"),
    "incidents": re.compile(rf"{_DATED}\.(?:\d{{4}}\.json|txt|html)"),
    "pins": re.compile(rf"{_ID}/[^/]+\.json"),
    "rewrites": re.compile(rf"{_DATED}\.(?:json|undone)"),
    "samples": re.compile(rf"{_DATED}\.\d{{6,9}}\.json"),
    "saving": re.compile(r"[^/]+\.json"),
    "seen": re.compile(r"[0-9a-f]{32}\.json"),
    "settings": re.compile(r"allow-nonfinite\.\d+\.json"),
    "silences": re.compile(rf"{_DATED}\.json"),
    "starts": re.compile(r"\d+\.json"),
    "told": re.compile(r"[0-9a-f]{12}/(?:[0-9a-f]{32}|before\.\d+)\.json"),
    "nodes": re.compile(r"(?:leader|[0-9a-f]{32}/[^/]+)\.json"),
    "training": re.compile(r"[^/]+\.\d+\.\d+\.json"),
    "trainings": re.compile(r"[^/]+\.json"),
}

RECORDS = frozenset(_SINGLE | _KEYS.keys())  # the names at the top of the records

# What those records hold whose names a user's files may have, too. Each release has written these fields.
_LEASE = frozenset(("format", "owner", "since", "token"))
_FIELDS = {
    "daemon.json": frozenset(("address", "format", "host", "pid")),
    "lineage.json": frozenset(("begun", "format", "token")),
    "nodes": frozenset(("format",)),
    "room.json": frozenset(("format", "needed", "problem")),
    "saving": _LEASE,
    "seen": frozenset(("boot_id", "format", "host", "what")),
    "starts": _LEASE,
    "trainings": _LEASE,
}
_LARGEST = 1 << 20  # bytes of such a record


def is_record(key: str) -> bool:
    """True if this is the key of a record, of a file in a copy of a checkpoint, or of a temporary of ours, where the
    records are not in the run."""
    top, _, rest = key.partition("/")
    if any(kind.fits(part) for part in key.split("/") for kind in LEFT_IN_RECORDS):
        return top in _KEYS or any(kind.fits(top) for kind in LEFT_IN_RECORDS)
    return top in _SINGLE if not rest else top in _KEYS and _KEYS[top].fullmatch(rest) is not None


def records_in(storage: Storage) -> list[str]:
    """Return the keys of all records in a folder that may hold other files.

    Where a name alone does not say that, what a file holds does. Raises ObjectMissingError if there is no such folder.
    """
    return [entry.key for entry in storage.list("", recursive=True) if _is_ours(storage, entry)]


def names_taken(storage: Storage) -> list[str]:
    """Return the keys of files in a folder without records that would be taken for records."""
    try:
        tops = [entry for entry in storage.list("") if entry.name in _FIELDS]
    except ObjectMissingError:
        return []
    inside = (storage.list(top.key, recursive=True) if top.kind == "folder" else [top] for top in tops)
    return [entry.key for entries in inside for entry in entries if entry.kind != "folder" and is_record(entry.key)]


def _is_ours(storage: Storage, entry: Entry) -> bool:
    key = entry.key
    if entry.kind != "file" or not is_record(key):
        return False
    if key in _LOCKS:
        return entry.size == 0
    if key == IGNORE_KEY:
        return _content(storage, key) == IGNORE_TEXT
    fields = _FIELDS.get(key.partition("/")[0])
    if fields is None:
        return True
    try:
        return msgspec.json.decode(_content(storage, key), type=dict[str, Any]).keys() >= fields
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def _content(storage: Storage, key: str) -> bytes:
    with storage.open(key) as reader:
        return reader.read(0, min(reader.entry.size, _LARGEST))
