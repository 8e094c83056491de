"""The checksum files that lie beside what is verified: they are found by their names, and used by themselves.

What such a file says that cannot be understood is a warning. A file that cannot be read, or that contradicts itself,
leaves the question open: ChecksumFileError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ckptguard.checks.evidence import FoundSums, StatedSum
from ckptguard.errors import (
    ChecksumFileError,
    CouldNotTellError,
    NotFoundError,
    ObjectMissingError,
    SettingsError,
    StorageError,
)
from ckptguard.formats import tensor_suffix
from ckptguard.formats.table import is_sum_list, summed_file
from ckptguard.layouts import Checkpoint
from ckptguard.layouts.hub_snapshot import HUB_RECORDS, stated_by_name
from ckptguard.storage import Entry, Storage
from ckptguard.values.ids import escape, is_safe_path
from ckptguard.values.verdict import Finding, Severity
from ckptguard.verification.checksum_files import (
    LONGEST,
    CheckSums,
    Stated,
    Sums,
    fitting_sums,
    parse_check_sums,
    sums_for,
)

_MOST_LISTS = 10_000
_MOST_REMARKS = 1000
_LONGEST_RECORD = 4096
_HUB = "the hub's record of the download"


def from_hub(sums: FoundSums) -> bool:
    """True if the hub's record says that a file was downloaded."""
    return any(one.source == _HUB for one in sums.stated)


def given_sums(sums: CheckSums, storage: Storage, checkpoint: Checkpoint) -> FoundSums:
    """What the checksum file that the user named states about a checkpoint; SettingsError if it is nothing."""
    stated = sums_for(sums.stated, checkpoint.path, checkpoint.files, root=storage.url, folder=sums.folder)
    name = escape(sums.name)
    return FoundSums(tuple(StatedSum(file, *sum, name) for file, all in stated.items() for sum in all.items()), (name,))


def find_sums(
    storage: Storage,
    checkpoint: Checkpoint,
    beside: Sequence[Entry] = (),
    *,
    key: Callable[[str], str] = str,
    hub_record: bool = False,
) -> FoundSums:
    """What checksum files in a checkpoint, and among the files `beside` it, state about its files. `key` says where a
    file lies now that was listed elsewhere. `hub_record`: what a download from the hub noted in its folder counts."""
    lists = {e.key: e for e in (*checkpoint.entries, *checkpoint.irregular, *beside) if is_sum_list(e.name)}
    if len(lists) > _MOST_LISTS:
        raise ChecksumFileError(f"the checksum files are {len(lists):,}, too many to be read")
    found: list[StatedSum] = []
    names: list[str] = []
    remarks: list[Finding] = []
    times = {e.key: e.mtime_ns for e in checkpoint.entries}
    for entry in lists.values():
        name = escape(checkpoint.inside(entry.key))
        sums, odd = _read(storage, entry, name, key)
        about = _about(sums, entry, checkpoint, storage)
        if about is None:  # a sum of another file
            continue
        remarks += _remarks(odd, name, entry, says_nothing=not sums)
        if sums:
            names.append(name)
        for file, stated in about.items():
            if file not in times and len(remarks) < _MOST_REMARKS and _is_there(storage, key(file)):
                message = f"{name} lists it, but it is not a file that is read here: its sum was not compared"
                remarks.append(Finding("digests", Severity.WARNING, message, file))
                continue
            written = times.get(file)
            earlier = entry.mtime_ns is not None and written is not None and entry.mtime_ns < written
            found += [StatedSum(file, *sum, name, earlier) for sum in stated.items()]
    if hub_record:
        found += _hub_record(storage, checkpoint)
    return FoundSums(tuple(found), tuple(names), tuple(remarks))


def _read(storage: Storage, entry: Entry, name: str, key: Callable[[str], str]) -> tuple[Sums, list[str]]:
    """What a list states, and a sentence for each line that was not understood."""
    odd: list[str] = []
    if entry.kind != "file":
        what = "a link, and was not followed" if entry.kind == "link" else "no regular file"
        raise ChecksumFileError(f"the checksum file {name} is {what}", key=entry.key)
    try:
        with storage.open(key(entry.key)) as reader:
            if reader.entry.size > LONGEST:
                raise ChecksumFileError(f"the checksum file {name} is too large to be one", key=entry.key)
            text = reader.read(0, reader.entry.size)
            reader.check_unchanged()
        return parse_check_sums(text, name, odd), odd
    except SettingsError as error:
        raise ChecksumFileError(f"the checksum file cannot be used: {error.message}") from error
    except (NotFoundError, StorageError) as error:
        raise ChecksumFileError(f"the checksum file {name} cannot be read: {error.message}", key=entry.key) from error


def _about(sums: Sums, entry: Entry, checkpoint: Checkpoint, storage: Storage) -> dict[str, Stated] | None:
    """What a list states about files of the checkpoint, there or not; None for the sum of one other file."""
    folder, file = entry.key.rpartition("/")[0], summed_file(entry.name)
    if file is not None and len(sums) == 1:
        (path, one), place = next(iter(sums.items())), f"{folder}/{file}".removeprefix("/")
        if path.rpartition("/")[2] == file or (not path and (place in checkpoint.files or tensor_suffix(file))):
            return {place: one} if _is_of(place, checkpoint) else None
    root = storage.root or "/storage"  # paths that lead out of it are nobody's
    try:
        stated = fitting_sums(sums, folder, checkpoint.files, root=root, folder=f"{root}/{folder}")
    except SettingsError as error:
        name = escape(checkpoint.inside(entry.key))
        raise ChecksumFileError(error.message.replace("the checksum file", f"the checksum file {name}", 1)) from error
    if not stated:  # of what a checkpoint needs, all may be gone; a list of pictures is about something else
        places = {f"{folder}/{path}".removeprefix("/"): one for path, one in sums.items() if is_safe_path(path)}
        stated = {place: one for place, one in places.items() if tensor_suffix(place)}
    return {file: one for file, one in stated.items() if _is_of(file, checkpoint)}


def _is_there(storage: Storage, key: str) -> bool:
    """Whether there is anything under a key that is no file of the checkpoint: a link, or a file in a folder that no
    listing enters."""
    try:
        storage.stat(key)
    except ObjectMissingError:
        return False
    except StorageError as error:
        raise CouldNotTellError(f"{escape(key)} cannot be looked up: {error.message}", key=key) from error
    return True


def _is_of(key: str, checkpoint: Checkpoint) -> bool:
    return key in checkpoint.files or (key != checkpoint.path and key.startswith(f"{checkpoint.path}/"))


def _remarks(odd: Sequence[str], name: str, entry: Entry, *, says_nothing: bool) -> Iterator[Finding]:
    if says_nothing:
        yield Finding("digests", Severity.WARNING, f"{name} states no checksums that are known here", entry.key)
    elif odd:
        lines = "1 line" if len(odd) == 1 else f"{len(odd):,} lines"
        message = f"{lines} of {name} not understood, first {odd[0].removeprefix(f'{name}, ')}"
        yield Finding("digests", Severity.WARNING, message, entry.key)


def _hub_record(storage: Storage, checkpoint: Checkpoint) -> Iterator[StatedSum]:
    """What the hub stated of the files that were downloaded into this folder."""
    root = checkpoint.path.rpartition("/")[0] if checkpoint.path in checkpoint.files else checkpoint.path
    folder = f"{root}/{HUB_RECORDS}".removeprefix("./").removeprefix("/")
    for entry in checkpoint.entries if storage.root is not None else ():
        inside = entry.key.removeprefix(f"{root}/")
        try:
            with storage.open(f"{folder}/{inside}.metadata") as reader:
                text = reader.read(0, min(reader.entry.size, _LONGEST_RECORD)).decode("utf-8", "replace")
        except ObjectMissingError:  # most folders have none
            continue
        except (NotFoundError, StorageError) as error:
            what = escape(f"{folder}/{inside}.metadata")
            raise ChecksumFileError(
                f"the checksum file {what} cannot be read: {error.message}", key=entry.key
            ) from error
        _, tag, when, *_ = (*text.split("\n"), "", "", "")
        stated = stated_by_name(tag.strip())
        if stated is not None:
            yield StatedSum(entry.key, *stated, _HUB, doubtful=_is_later(entry, when))


def _is_later(entry: Entry, when: str) -> bool:
    """Whether a file was written after the time that a record states; also where that is no time."""
    try:
        stated = float(when)
    except ValueError:
        return True
    return not math.isfinite(stated) or (entry.mtime_ns is not None and entry.mtime_ns / 1e9 > stated + 1)
