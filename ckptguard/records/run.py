"""A run: the trainer's files, and what ckptguard records about them."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from typing import TYPE_CHECKING, Any

import msgspec

from ckptguard.errors import ObjectExistsError, ObjectMissingError, RecordsError, SettingsError
from ckptguard.storage import Storage, normalise_url, open_storage
from ckptguard.storage.failures import translated
from ckptguard.storage.redaction import plain_url
from ckptguard.values.ids import RECORDS_FOLDER, escape
from ckptguard.values.patterns import Pattern
from ckptguard.values.record_text import decode_record
from ckptguard.values.settings import Settings
from ckptguard.values.storage_options import NO_OPTIONS, StorageOptions

if TYPE_CHECKING:
    from ckptguard.storage.retries import Retries

RECORDS_FORMAT = 1
FORMAT_KEY = "format.json"
_WHOSE_KEY = "run.json"  # of records that lie elsewhere
_DEFAULTS = Settings()
_COUNTED = re.compile(r"checkpoint_\d+")
_MAX_RECORD = 256 * 1024**2  # a manifest of 100 000 tensors takes some 25 MB


class Run(msgspec.Struct, frozen=True):
    """One training run. `storage` holds the trainer's files, `records` ours (in the run unless set elsewhere)."""

    url: str
    storage: Storage
    records: Storage
    records_inside: bool
    patterns: tuple[Pattern, ...] = ()  # the user's own words about names
    options: StorageOptions = NO_OPTIONS  # what the storages of this run, and those beside it, are opened with

    @property
    def run_id(self) -> str:
        """First 12 hexadecimal digits of the SHA-256 of the normalised URL."""
        return hashlib.sha256(self.url.encode("utf-8", "surrogateescape")).hexdigest()[:12]

    def usable(self, key: str) -> str:
        """An absolute path or URL for a key of the run, usable as it is."""
        return self.url if key == "." else f"{self.url.rstrip('/')}/{key}"

    def usable_record(self, key: str) -> str:
        """An absolute path or URL for a key of the records."""
        return f"{self.records.url.rstrip('/')}/{key}"

    def shared(self) -> tuple[Storage, str, str]:
        """One storage that sees both the run and the records, with the key prefix of each.

        SettingsError where no storage does (a remote run with records elsewhere).
        """
        if self.records_inside:
            return self.storage, "", f"{RECORDS_FOLDER}/"
        if self.storage.root is not None and self.records.root is not None:
            return open_storage("/"), self.storage.root.strip("/") + "/", self.records.root.strip("/") + "/"
        raise SettingsError(
            "copies and quarantine need the records on the same storage as the run",
            hint="leave `records` unset, or put both on a local disk",
        )


def open_run(
    url: str, settings: Settings = _DEFAULTS, *, must_exist: bool = True, retries: Retries | None = None
) -> Run:
    """Open a run as its settings say: where its records lie, what its names mean, and with which storage options.
    Nothing is written.

    `retries` are for a remote one. Raises:
        NotFoundError: it is absent and must exist.
        RecordsError: its records are of a newer format, or damaged.
        SettingsError: the records are those of another run.
    """
    normal = normalise_url(url)
    opening = functools.partial(open_storage, retries=retries, options=settings.storage)
    storage = opening(normal, must_exist=must_exist)
    records = settings.records
    place = normalise_url(records) if records else f"{normal.rstrip('/')}/{RECORDS_FOLDER}"
    run = Run(
        url=normal,
        storage=storage,
        records=opening(place, must_exist=False),
        records_inside=not records,
        patterns=settings.patterns,
        options=settings.storage,
    )
    if run.records_inside and _is_link(storage):
        raise RecordsError(f"{RECORDS_FOLDER} in {run.url} is a link; records are never written through links")
    _check_format(run)
    _refuse_anothers_records(run)
    _refuse_counted_folder(run)
    return run


def begin_run(url: str | os.PathLike[str], settings: Settings = _DEFAULTS) -> Run:
    """Open a run that need not be there yet, and is afterwards."""
    place = normalise_url(url)
    if "://" not in place:
        with translated("", place):
            os.makedirs(place, exist_ok=True)
        return open_run(place, settings)
    run = open_run(place, settings, must_exist=False)
    _ensure_format(run)  # an object store has no empty folders
    return run


def _refuse_anothers_records(run: Run) -> None:
    """Records that lie elsewhere are those of one run: with two, the verdict on a checkpoint of one would be taken for
    that on its namesake in the other. A local run that is no longer where it was has been moved."""
    text = None if run.records_inside else read_record(run, _WHOSE_KEY)
    if text is None:
        return
    stated = decode_record(text, dict[str, Any], f"{_WHOSE_KEY} of {run.records.url}").get("run")
    if not isinstance(stated, str) or stated == plain_url(run.url):
        return
    root = run.storage.root if "://" not in stated else None
    if root is not None and (not os.path.exists(stated) or os.path.realpath(stated) == os.path.realpath(root)):
        return
    raise SettingsError(
        f"the records in {run.records.url} are those of another run ({escape(stated)})",
        hint="give each run records of its own",
    )


def _refuse_counted_folder(run: Run) -> None:
    """Accelerate's automatic naming takes the last number out of every name in ``checkpoints/``: a folder of ours
    there would be an IndexError in its next save."""
    if not run.records_inside or run.url.rstrip("/").rpartition("/")[2] != "checkpoints":
        return
    try:
        names = {e.key for e in run.storage.list("", recursive=False) if e.kind == "folder"}
    except ObjectMissingError:
        return
    if RECORDS_FOLDER not in names and any(_COUNTED.fullmatch(name) for name in names):
        raise SettingsError(
            f"Accelerate counts its checkpoints by every name in {run.url}, so no records can lie there",
            hint="name the folder above it as the run, or put the records elsewhere (records = URL)",
        )


def _is_link(storage: Storage) -> bool:
    try:
        return storage.stat(RECORDS_FOLDER).kind == "link"
    except ObjectMissingError:
        return False


def has_records(run: Run) -> bool:
    """Whether ckptguard ever wrote records for this run."""
    return read_record(run, FORMAT_KEY) is not None


def read_record(run: Run, key: str) -> bytes | None:
    """The whole of a record; None if there is none."""
    try:
        with run.records.open(key) as reader:
            if reader.entry.size > _MAX_RECORD:
                raise RecordsError(f"the record {key} is absurdly large ({reader.entry.size} bytes)")
            return reader.read(0, reader.entry.size)
    except ObjectMissingError:
        return None


def create_record(run: Run, key: str, value: bytes) -> None:
    """Write a record that must not exist yet, durably: ObjectExistsError if it does."""
    _ensure_format(run)
    run.records.create(key, value)


def list_records(run: Run, folder: str, *, recursive: bool = False, with_content: bool = False) -> list[str]:
    """Keys of the records in a folder, relative to it; none where there is no such folder. `with_content` leaves out
    empty files, which only a broken write leaves."""
    try:
        entries = run.records.list(folder, recursive=recursive)
    except ObjectMissingError:
        return []
    wanted = [e for e in entries if not with_content or (e.kind == "file" and e.size)]
    return [e.key.removeprefix(folder + "/") for e in wanted if not recursive or e.kind == "file"]


def record_names(run: Run, folder: str) -> list[str]:
    """Names of all records below a folder, relative to it, by one listing of names; none where there is no such folder.
    Whether one is empty is not known."""
    try:
        return [key.removeprefix(folder + "/") for key in run.records.names(folder)]
    except ObjectMissingError:
        return []


def has_content(run: Run, key: str) -> bool:
    """Whether a record is there and not empty: only a broken write leaves empty ones."""
    try:
        entry = run.records.stat(key)
    except ObjectMissingError:
        return False
    return entry.kind == "file" and entry.size > 0


def _check_format(run: Run) -> None:
    text = read_record(run, FORMAT_KEY)
    if text is None:
        return
    stated = decode_record(text, dict[str, int], f"{FORMAT_KEY} of the records of {run.url}").get("format")
    if stated is None:
        raise RecordsError(f"{FORMAT_KEY} of the records of {run.url} states no format")
    if stated > RECORDS_FORMAT:
        raise RecordsError(
            f"the records of {run.url} have format {stated}; this version knows up to {RECORDS_FORMAT}",
            hint="upgrade ckptguard",
        )


def _ensure_format(run: Run) -> None:
    try:
        run.records.stat(FORMAT_KEY)
    except ObjectMissingError:
        _create_format(run)
    _refuse_anothers_records(run)  # another run may have begun them since this one was opened


def _create_format(run: Run) -> None:
    first = [(".gitignore", b"*\n"), (FORMAT_KEY, msgspec.json.encode({"format": RECORDS_FORMAT}) + b"\n")]
    if not run.records_inside:
        first.insert(0, (_WHOSE_KEY, msgspec.json.encode({"format": 1, "run": plain_url(run.url)}) + b"\n"))
    for key, value in first:
        try:
            run.records.create(key, value)
        except ObjectExistsError:
            pass  # another process was first: equal bytes
