"""Names and ids: checkpoint ids, series, safe paths, and escaping of text from files."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import TypeAlias

import msgspec

STEP_DIGITS = 12
MAX_STEP = 10**STEP_DIGITS - 1
RECORDS_FOLDER = "_ckptguard"
_MOST_DIGITS = 18
_LONGEST_FOLDER = 200  # bytes; file systems allow 255

_ID = re.compile(r"(?P<step>\d{1,12}(?:-\d{1,12})*|-)\.(?P<generation>[1-9]\d{0,8})")

# A number that says which training it is, not how far it is: ``fold1_epoch5``, ``seed_3-step100``, ``lr1e-4_500``.
_OF_TRAINING = r"(?<![a-z])(?:k?fold|seed|trial|split|cv|lr|bs|wd)[-_=]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![a-z0-9])"
OF_TRAINING = re.compile(rf"[-_]*{_OF_TRAINING}", re.IGNORECASE)
_NUMBERS = re.compile(rf"({_OF_TRAINING})|\d+", re.IGNORECASE)

# The place of a checkpoint in its series, from its name: a number, or several numbers compared in order
# (``recovery-1-50``). None for a fixed name, whose contents are ordered by their saving.
Step: TypeAlias = int | tuple[int, ...] | None


def numbers_of(step: Step) -> tuple[int, ...]:
    """Return the sort key of a step within its series. A fixed name has no numbers, and sorts first."""
    return () if step is None else (step,) if isinstance(step, int) else step


def in_number_order(text: str) -> tuple[tuple[int, str], ...]:
    """Return the sort key of a name by the numbers in it: 2 before 10."""
    return tuple((int(p[:18]), "") if p.isascii() and p.isdigit() else (-1, p) for p in re.split(r"(\d+)", text))


def run_id_of(url: str) -> str:
    """Return the id of a run, by its normalised URL."""
    return short_digest(url)


def short_digest(text: str) -> str:
    """Return the first 12 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def name_of_run(url: str) -> str:
    """Return the last part of a run's URL, which people call it by."""
    return url.rstrip("/").rpartition("/")[2]


def named_path(path: str, url: str) -> str:
    """Return a checkpoint's path for people. Model files at the root of the run at `url` have the folder's name."""
    return name_of_run(url) if path == "." else path


def step_text(step: Step) -> str:
    """Return a step for people: ``500``, ``1-50``; ``-`` for a fixed name."""
    return "-".join(map(str, numbers_of(step))) or "-"


def record_step(step: Step) -> str:
    """Return a step for record names. Within one series these sort like the steps."""
    if isinstance(step, int):  # nearly always
        return f"{step:0{STEP_DIGITS}d}"
    return "-".join(f"{n:0{STEP_DIGITS}d}" for n in numbers_of(step)) or "-"


def single_number(step: Step) -> int | None:
    """Return the step as one number; None for a fixed name, and for a name with several numbers."""
    return step if isinstance(step, int) else None


class CheckpointId(msgspec.Struct, frozen=True):
    """One content that was saved for one step of a series. `step` is None for a fixed name (``last.pt``)."""

    series: str
    step: Step
    generation: int

    def __str__(self) -> str:
        """Return the id for people: ``500.1``, ``1-50.1``; ``-.7`` for the 7th content of a fixed name."""
        return f"{step_text(self.step)}.{self.generation}"

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        """The sort key of the ids of a series, in the order of training."""
        return numbers_of(self.step), self.generation

    @property
    def number(self) -> int | None:
        """The step as one number, if its name states one."""
        return self.step if isinstance(self.step, int) else None

    @property
    def nth_save(self) -> str:
        """What is said behind the path: `` (save 4)`` for the 4th content under one name, nothing for the first."""
        return f" (save {self.generation})" if self.generation > 1 else ""

    @property
    def record_name(self) -> str:
        """The id in record names, which sort by step: ``000000000500.1``."""
        return f"{record_step(self.step)}.{self.generation}"

    @property
    def record_path(self) -> str:
        """The folder of its series and its own name, below every folder of the records."""
        return f"{series_folder(self.series)}/{self.record_name}"


def parse_id(series: str, text: str) -> CheckpointId | None:
    """Parse either form of an id in a series; None if it is not one."""
    match = _ID.fullmatch(text)
    if match is None:
        return None
    numbers = () if match["step"] == "-" else tuple(map(int, match["step"].split("-")))
    return CheckpointId(series, step_of_numbers(numbers), int(match["generation"]))


def whole_number(word: str) -> int | None:
    """Return the number that a word of decimal digits states. None for another word, and for more digits than a step
    or a start ever has: Python would refuse thousands in words of its own."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS else None


def step_of_numbers(numbers: tuple[int, ...]) -> Step:
    """Return the step for the numbers in a name."""
    return None if not numbers else numbers[0] if len(numbers) == 1 else numbers


def id_from_record(folder: str, name: str) -> CheckpointId | None:
    """Return the id for a series' folder and a record's name in it; None if the name is not an id."""
    return parse_id(series_from_folder(folder), name)


def series_of(path: str) -> str:
    """Return the series of a checkpoint path in its run: digits in its last part are replaced by ``#``.

    Folders keep their digits: ``seed0/`` and ``seed1/`` of a sweep are two series. So are ``fold0_#.pt`` and
    ``fold1_#.pt``, and all whose number says which training it is. A name too long for a folder of the records is cut,
    and ends in a hash of the whole.
    """
    folder, slash, name = path.rpartition("/")
    series = folder + slash + _NUMBERS.sub(lambda number: number[1] or "#", name)
    if len(series_folder(series)) <= _LONGEST_FOLDER:
        return series
    digest = hashlib.sha256(series.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    while len(series_folder(series)) > _LONGEST_FOLDER - len(digest) - 1:
        series = series[:-1]
    return f"{series}~{digest}"


def training_named_in(path: str) -> tuple[str, ...]:
    """Return what the last part of a path, or of a series, says about which training it is: ``("fold1",)``."""
    name = path.rpartition("/")[2]
    return tuple(number[1].lower() for number in _NUMBERS.finditer(name) if number[1])


def folder_of(path: str) -> str:
    """Return the folder of a checkpoint or a series."""
    return path.rpartition("/")[0]


def series_folder(series: str) -> str:
    """Return a folder name for a series: reversible, without separators, valid on every file system and store."""
    return re.sub(r"[^A-Za-z0-9._#=-]", lambda m: "".join(f"%{b:02X}" for b in m[0].encode()), series)


def series_from_folder(folder: str) -> str:
    """Invert `series_folder`."""
    raw = re.sub(rb"%([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), folder.encode())
    return raw.decode("utf-8", "surrogateescape")


def is_safe_path(path: str) -> bool:
    """True if a path from a file may be joined to a folder: relative, normalised, inside, no URL, no NUL."""
    if not path or "\0" in path or "://" in path or path.startswith("/"):
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))


def is_temporary(name: str) -> bool:
    """True if a file or folder name is a writer's temporary, which belongs to no checkpoint.

    So are ``._`` files, which hold macOS attributes of another file, and the folder of a file system's repairs.
    """
    return name.startswith((".tmp", "tmp-", "._")) or name.endswith(".tmp") or name == "lost+found"


def escape(text: str) -> str:
    """Make text from a file safe to print: control, format (right-to-left marks) and surrogate characters are
    escaped."""
    if text.isprintable():
        return text
    return "".join(
        f"\\u{ord(c):04x}" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else c for c in text
    )
