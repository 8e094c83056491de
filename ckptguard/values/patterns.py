"""The user's own rules for names: which paths of a run are checkpoints, and where their step is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.values.ids import MAX_STEP


class Pattern(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`path` is a shell pattern (fnmatch; ``*`` also matches ``/``) for paths relative to the run.

    A matching path is a checkpoint; with `ignore` neither it nor anything inside it is. `step` is a regular expression
    with one group of digits, searched in the path. Patterns come from the user, never from a run.
    """

    path: str
    step: str | None = None
    ignore: bool = False

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.step).groups if self.step is not None else 1
        except re.error as error:
            raise SettingsError(
                f"the step of pattern {self.path} is not a regular expression{_place(error)}"
            ) from error
        if not self.path or groups != 1:
            raise SettingsError(f"a pattern needs a path, and its step needs exactly one group: {self.path}")

    def step_of(self, path: str) -> int | None:
        """Return the step that `step` finds in a path, or None."""
        match = re.search(self.step, path) if self.step is not None else None
        digits = match[1] if match else None
        if digits is None or not digits.isascii() or not digits.isdigit():
            return None
        step = int(digits[:20])
        return step if step <= MAX_STEP else None


class Saves(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user says about which files are saved together: shell patterns (fnmatch) for paths relative to the run.

    All that matches `together` is one save. Else what matches `apart` is of no save of others.
    """

    together: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.together and not self.apart:
            raise SettingsError('an entry of saves needs together = ["G_*.pth", "D_*.pth"], or apart')

    @staticmethod
    def has(patterns: Sequence[str], series: str) -> bool:
        """True if one of the patterns is for a series. Its ``#`` stands for numbers, which a pattern may state."""
        return any(
            fnmatchcase(series, pattern) or fnmatchcase(series, re.sub(r"\d+", "#", pattern)) for pattern in patterns
        )


def _place(error: re.error) -> str:
    return "" if error.pos is None else f": see its character {error.pos + 1}"


def choose(patterns: Sequence[Pattern], path: str) -> Pattern | None:
    """Return the first pattern that makes this path a checkpoint."""
    return next((p for p in patterns if not p.ignore and fnmatchcase(path, p.path)), None)


def is_ignored(patterns: Sequence[Pattern], key: str) -> bool:
    """True if a pattern excludes this file, or a folder that contains it, from the run."""
    parts = key.split("/")
    above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    return any(p.ignore and any(fnmatchcase(a, p.path) for a in above) for p in patterns)
