"""Names and ids: checkpoint ids, series, checked paths, escaping of what comes from files."""

from __future__ import annotations

import hashlib
import re
import unicodedata

import msgspec

STEP_DIGITS = 12
MAX_STEP = 10**STEP_DIGITS - 1
RECORDS_FOLDER = "_ckptguard"
_LONGEST_FOLDER = 200  # bytes; file systems end at 255

_ID = re.compile(r"(?P<step>\d{1,12}|-)\.(?P<generation>[1-9]\d{0,8})")


class CheckpointId(msgspec.Struct, frozen=True):
    """One content that was saved under one step of a series. `step` is None where it cannot be known."""

    series: str
    step: int | None
    generation: int

    def __str__(self) -> str:
        """The id as people read it: ``500.1``; ``-.1`` for a checkpoint whose step cannot be known."""
        return f"{'-' if self.step is None else self.step}.{self.generation}"

    @property
    def order(self) -> tuple[int, int]:
        """What sorts the ids of a series in the order of training. No step sorts first."""
        return (-1 if self.step is None else self.step, self.generation)

    @property
    def record_name(self) -> str:
        """The id as records are named, so that names sort by step: ``000000000500.1``."""
        return f"{'-' if self.step is None else f'{self.step:0{STEP_DIGITS}d}'}.{self.generation}"

    @property
    def record_path(self) -> str:
        """The folder of its series and its own name, as below every folder of the records."""
        return f"{series_folder(self.series)}/{self.record_name}"


def parse_id(series: str, text: str) -> CheckpointId | None:
    """The id in a series that either form of an id names; None if it is not one."""
    match = _ID.fullmatch(text)
    if match is None:
        return None
    step = match["step"]
    return CheckpointId(series, None if step == "-" else int(step), int(match["generation"]))


def id_from_record(folder: str, name: str) -> CheckpointId | None:
    """The id behind a series' folder and a record's name in it; None if the name is no id."""
    return parse_id(series_from_folder(folder), name)


def series_of(path: str) -> str:
    """The series of a checkpoint path in its run: digit runs of its last part replaced by ``#``. Folders keep their
    digits: ``seed0/`` and ``seed1/`` of a sweep are not one series. A name too long to be a folder's (of the records)
    is cut, and ends in a hash of the whole."""
    folder, slash, name = path.rpartition("/")
    series = folder + slash + re.sub(r"\d+", "#", name)
    if len(series_folder(series)) <= _LONGEST_FOLDER:
        return series
    digest = hashlib.sha256(series.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    while len(series_folder(series)) > _LONGEST_FOLDER - len(digest) - 1:
        series = series[:-1]
    return f"{series}~{digest}"


def series_folder(series: str) -> str:
    """One folder name for a series: reversible, no separators, no name that a file system or store objects to."""
    return re.sub(r"[^A-Za-z0-9._#=-]", lambda m: "".join(f"%{b:02X}" for b in m[0].encode()), series)


def series_from_folder(folder: str) -> str:
    """The inverse of `series_folder`."""
    raw = re.sub(rb"%([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), folder.encode())
    return raw.decode("utf-8", "surrogateescape")


def is_safe_path(path: str) -> bool:
    """Whether a path read from a file may be joined to a folder: relative, normalised, inside, no URL, no NUL."""
    if not path or "\0" in path or "://" in path or path.startswith(("/", "~")):
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))


def is_temporary(name: str) -> bool:
    """Whether a file or folder name is a writer's temporary, which belongs to no checkpoint. So are the ``._`` files
    in which macOS keeps attributes of the file that they are named after, and the folder of a file system's repairs."""
    return name.startswith((".tmp", "tmp-", "._")) or name.endswith(".tmp") or name == "lost+found"


def escape(text: str) -> str:
    """Text from a file, safe to print: control, format (right-to-left marks) and surrogate characters as escapes."""
    return "".join(
        f"\\u{ord(c):04x}" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else c for c in text
    )
