"""A run: the trainer's files, and what ckptguard records about them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ckptguard.errors import ObjectExistsError, ObjectMissingError, RecordsError, SettingsError
from ckptguard.records.keys import IGNORE_KEY, IGNORE_TEXT, WHOSE_KEY, names_taken
from ckptguard.storage import Storage, folder_must_exist, normalise_url, open_storage
from ckptguard.storage.failures import translated
from ckptguard.storage.local.removal import begin_again, note_records
from ckptguard.storage.protocol import find_entry
from ckptguard.storage.redaction import plain_url
from ckptguard.storage.traits import traits_of_url
from ckptguard.values.ids import RECORDS_FOLDER, escape, run_id_of
from ckptguard.values.patterns import Pattern, Saves
from ckptguard.values.record_formats import FORMAT_KEY, PLAIN, RECORDS
from ckptguard.values.record_text import decode_record
from ckptguard.values.settings import Settings
from ckptguard.values.storage_options import NO_OPTIONS, StorageOptions

if TYPE_CHECKING:
    from ckptguard.storage.remote.listed_storage import ListedRun
    from ckptguard.storage.retries import Retries

_DEFAULTS = Settings()
_COUNTED = re.compile(r"checkpoint_\d+")
_Kind = TypeVar("_Kind")
_MAX_RECORD = 256 * 1024**2  # a manifest of 100 000 tensors takes about 25 MB


class Run(msgspec.Struct, frozen=True):
    """One training run. `storage` has the trainer's files, `records` has ours (in the run, unless set elsewhere)."""

    url: str
    storage: Storage
    records: Storage
    records_inside: bool
    patterns: tuple[Pattern, ...] = ()  # the user's own rules for names
    options: StorageOptions = NO_OPTIONS  # options for the storages of this run, and of those beside it
    new_format: int = RECORDS.writes  # of its records, if they do not exist yet
    saves: tuple[Saves, ...] = ()  # what the user says is saved together
    labels: tuple[str | None, ...] = ()  # the values of `LABELS`, for messages
    no_plugins: bool = False
    layouts: tuple[str, ...] = ()  # the names of plugins that find checkpoints
    plugin_memory: int = _DEFAULTS.worker_memory

    @property
    def run_id(self) -> str:
        """First 12 hexadecimal digits of the SHA-256 of the normalised URL."""
        return run_id_of(self.url)

    def usable(self, key: str) -> str:
        """Return an absolute path or URL for a key of the run, ready to open."""
        return self.url if key == "." else f"{self.url.rstrip('/')}/{key}"

    def usable_record(self, key: str) -> str:
        """Return an absolute path or URL for a key of the records."""
        return self.records.path_of(key)

    @property
    def has_shared(self) -> bool:
        """True if one storage contains the run and the records, so that files can be copied and moved between them."""
        return self.records_inside or (self.storage.root is not None and self.records.root is not None)

    def shared(self) -> tuple[Storage, str, str]:
        """Return one storage that contains the run and the records, and the key prefix of each.

        Raises SettingsError if there is none.
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
    url: str,
    settings: Settings = _DEFAULTS,
    *,
    must_exist: bool = True,
    retries: Retries | None = None,
    may_begin: bool = True,
    listed: ListedRun | None = None,
) -> Run:
    """Open a run by its settings: the place of its records, its naming rules, and its storage options.

    Nothing is written. `retries` are for a remote run. Without `may_begin`, local records that this process saw, and
    that were removed from this folder, are not begun again: somebody may be removing the run. `listed` are the storages
    of the same run, opened by `open_listed`.

    Raises:
        NotFoundError: it does not exist, and must.
        RecordsError: its records have a newer format, or are damaged.
        SettingsError: the records belong to another run.
    """
    normal = normalise_url(url)
    opening = functools.partial(open_storage, retries=retries, options=settings.storage)
    inside = not settings.records
    if listed is not None:
        storage: Storage = listed.storage
        records: Storage = listed.records
        if must_exist:
            folder_must_exist(storage, normal)
    else:
        storage = opening(normal, must_exist=must_exist)
        records = opening(settings.records or f"{normal.rstrip('/')}/{RECORDS_FOLDER}", must_exist=False)
    run = Run(
        normal,
        storage,
        records,
        inside,
        patterns=settings.patterns,
        saves=settings.saves,
        options=settings.storage,
        new_format=settings.records_format,
        labels=(settings.team, settings.project, settings.owner),
        no_plugins=settings.no_plugins,
        layouts=() if settings.no_plugins else settings.layouts,
        plugin_memory=settings.worker_memory,
    )
    folder = find_entry(storage, RECORDS_FOLDER) if inside else None
    if may_begin and folder is None and records.root is not None:
        begin_again(records.root)
    if folder is not None and folder.kind == "link":
        raise RecordsError(f"{RECORDS_FOLDER} in {run.url} is a link; records are never written through links")
    read_format(run)
    if not inside:
        _refuse_anothers_records(run)
    elif normal.endswith("/checkpoints"):
        _refuse_counted_folder(run)
    return run


def open_listed(url: str, settings: Settings) -> ListedRun | None:
    """Open the storages of a run for one that looks again and again. None if one listing does not show all of it: it is
    not on an object store, or its records are elsewhere."""
    normal = normalise_url(url)
    if settings.records or not traits_of_url(normal).flat_listing:
        return None
    from ckptguard.storage.remote.listed_storage import ListedRun

    places = (normal, f"{normal}/{RECORDS_FOLDER}")
    storage, records = (open_storage(place, must_exist=False, options=settings.storage) for place in places)
    return ListedRun(storage, records, RECORDS_FOLDER)


def begin_run(url: str | os.PathLike[str], settings: Settings = _DEFAULTS) -> Run:
    """Open a run, and create it if it does not exist."""
    place = normalise_url(url)
    if "://" not in place:
        with translated("", place):
            os.makedirs(place, exist_ok=True)
        begin_again(os.path.join(place, RECORDS_FOLDER))
        return open_run(place, settings)
    run = open_run(place, settings, must_exist=False)
    _ensure_format(run)  # an object store has no empty folders
    return run


def _refuse_anothers_records(run: Run) -> None:
    """Raise SettingsError if the records belong to another run, whose verdicts would be mixed up with this one's.

    A local run that is no longer at the recorded path has been moved, which is fine.
    """
    stated = _stated_run(run)
    if stated is None or stated == plain_url(run.url):
        return
    root = run.storage.root if "://" not in stated else None
    if root is not None and (not os.path.exists(stated) or os.path.realpath(stated) == os.path.realpath(root)):
        return
    raise SettingsError(
        f"the records in {run.records.url} belong to another run ({escape(stated)})",
        hint="give each run its own records",
    )


def _refuse_counted_folder(run: Run) -> None:
    """Raise SettingsError in Accelerate's ``checkpoints/``, where it reads a number in every name: ours would be an
    IndexError."""
    try:
        names = {e.key for e in run.storage.list("", recursive=False) if e.kind == "folder"}
    except ObjectMissingError:
        return
    if RECORDS_FOLDER not in names and any(_COUNTED.fullmatch(name) for name in names):
        raise SettingsError(
            f"Accelerate reads a number in every name in {run.url}, so records cannot be stored there",
            hint="name the folder above it as the run, or put the records elsewhere (records = URL)",
        )


def _refuse_taken_names(run: Run) -> None:
    """Raise SettingsError if a folder in which no run has begun its records has files with the names of records."""
    found = names_taken(run.records)
    if found and _stated_run(run) is None:
        raise SettingsError(
            f"{run.records.url} has a file with the name of a record ({escape(found[0])}), and no run's records",
            hint="let the setting records name a folder of its own",
        )


def says_whose(run: Run) -> bool:
    """True if records outside the run say that they are this run's, under the path that it has now."""
    stated = _stated_run(run)
    if stated is None:
        return False
    root = run.storage.root if "://" not in stated else None
    return stated == plain_url(run.url) or (root is not None and os.path.realpath(stated) == os.path.realpath(root))


def _stated_run(run: Run) -> str | None:
    """Return whose the records outside a run say that they are, or None."""
    found = read_parsed(run, WHOSE_KEY, dict[str, Any], f"{WHOSE_KEY} of {run.records.url}")
    stated = None if found is None else found.get("run")
    return stated if isinstance(stated, str) else None


def has_records(run: Run) -> bool:
    """True if ckptguard ever wrote records for this run."""
    return read_record(run, FORMAT_KEY) is not None


def read_record(run: Run, key: str) -> bytes | None:
    """Return a whole record, or None if it does not exist."""
    try:
        with run.records.open(key) as reader:
            if reader.entry.size > _MAX_RECORD:
                raise RecordsError(f"the record {key} is too large ({reader.entry.size} bytes)")
            return reader.read(0, reader.entry.size)
    except ObjectMissingError:
        return None


def read_parsed(run: Run, key: str, kind: type[_Kind], what: str) -> _Kind | None:
    """Return the parsed value of a record; None if it does not exist. RecordsError names `what` if it is unreadable."""
    text = read_record(run, key)
    return None if text is None else decode_record(text, kind, what)


def read_sound(run: Run, key: str, kind: type[_Kind], what: str) -> _Kind | None:
    """Return the parsed value of a record; None if it does not exist or cannot be parsed."""
    with contextlib.suppress(RecordsError):
        return read_parsed(run, key, kind, what)
    return None


def create_record(run: Run, key: str, value: object) -> None:
    """Write a record that must not exist yet, durably. Raises ObjectExistsError. Values other than bytes become
    JSON."""
    _ensure_format(run)
    run.records.create(key, value if isinstance(value, bytes) else as_line(value))


def write_once(run: Run, key: str, value: object = b"\n") -> bool:
    """Write a record. False if it exists, such as that of a faster process."""
    try:
        create_record(run, key, value)
    except ObjectExistsError:
        return False
    return True


def replace_record(run: Run, key: str, value: object) -> None:
    """Write a record as JSON in place of the one before, in one step."""
    with run.records.upload(key, replace=True) as upload:
        upload.write(as_line(value))
        upload.commit()


def as_line(value: object) -> bytes:
    """Return a value as JSON on one line."""
    return msgspec.json.encode(value) + b"\n"


def list_records(run: Run, folder: str, *, recursive: bool = False, with_content: bool = False) -> list[str]:
    """Return the keys of the records in a folder, relative to it. `with_content` leaves out empty files: broken
    writes."""
    try:
        entries = run.records.list(folder, recursive=recursive)
    except ObjectMissingError:
        return []
    wanted = [e for e in entries if not with_content or (e.kind == "file" and e.size)]
    return [e.key.removeprefix(folder + "/") for e in wanted if not recursive or e.kind == "file"]


def record_names(run: Run, folder: str) -> list[str]:
    """Return the names of all records below a folder, relative to it, from one listing. Some may be empty."""
    try:
        names = run.records.names(folder)
        return [key.removeprefix(f"{folder}/") for key in names] if folder else list(names)
    except ObjectMissingError:
        return []


def has_content(run: Run, key: str) -> bool:
    """True if a record exists and is not empty: only a broken write leaves empty ones."""
    entry = find_entry(run.records, key)
    return entry is not None and entry.kind == "file" and entry.size > 0


def read_format(run: Run) -> int | None:
    """Return the format of a run's records, or None if there are none. RecordsError for a newer one than we know."""
    what = f"{FORMAT_KEY} of the records of {run.url}"
    found = read_parsed(run, FORMAT_KEY, dict[str, int], what)
    if found is None:
        return None
    stated = found.get("format")
    if stated is None:
        raise RecordsError(f"{what} states no format")
    if stated > RECORDS.reads:
        raise RecordsError(
            f"the records of {run.url} have format {stated}; this version knows up to {RECORDS.reads}",
            hint="upgrade ckptguard",
        )
    return stated


def raise_format(run: Run, to: int) -> None:
    """State that the records of a run have a newer format, so that versions that do not know it refuse them.

    Only a person asks for it: it ends the work of older versions on this run.
    """
    replace_record(run, FORMAT_KEY, {"format": to})


def begin_records_elsewhere(run: Run) -> None:
    """Let a run have records, if they are not in the run. Whatever replaces a record calls this first: a user's file
    may have its name.

    Raises SettingsError if the folder is another run's, or if a name of a record is taken there.
    """
    if not run.records_inside:
        _ensure_format(run)


def _ensure_format(run: Run) -> None:
    if find_entry(run.records, FORMAT_KEY) is None:
        _create_format(run)
    if not run.records_inside:
        _refuse_anothers_records(run)  # another run may have created them since this one was opened


def _create_format(run: Run) -> None:
    first = [(IGNORE_KEY, IGNORE_TEXT), (FORMAT_KEY, as_line({"format": run.new_format}))]
    if not run.records_inside:
        _refuse_taken_names(run)
        first.insert(0, (WHOSE_KEY, as_line({"format": PLAIN.writes, "run": plain_url(run.url)})))
    for key, value in first:
        with contextlib.suppress(ObjectExistsError):  # another process was first, with equal bytes
            run.records.create(key, value)
    if run.records.root is not None:
        note_records(run.records.root)
