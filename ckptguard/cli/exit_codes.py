"""The one table of exit codes: scripts rely on it, every ``--help`` shows it, the README repeats it under test."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptguard.errors import (
    BusyError,
    CkptguardError,
    NoKnownGoodError,
    NotFoundError,
    RefusedError,
    RollbackExhausted,
    SettingsError,
)

if TYPE_CHECKING:
    from ckptguard.values.verdict import Outcome


class ExitCode(enum.IntEnum):
    """What the process ends with; the first that applies in the order of `PRECEDENCE`."""

    GOOD = 0
    FAILED = 1
    USAGE = 2
    BAD = 3
    UNDECIDED = 4
    NOT_FOUND = 10
    BUSY = 11
    EXHAUSTED = 12
    NO_KNOWN_GOOD = 13
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.GOOD: "all good",
    ExitCode.FAILED: "could not tell, or the tool failed",
    ExitCode.USAGE: "wrong usage or settings",
    ExitCode.BAD: "something checked is bad",
    ExitCode.UNDECIDED: "nothing bad, but incomplete, pending or suspect",
    ExitCode.NOT_FOUND: "no such run or checkpoint",
    ExitCode.BUSY: "locked, raced, or training is still writing",
    ExitCode.EXHAUSTED: "the rollback budget is spent",
    ExitCode.NO_KNOWN_GOOD: "no known-good checkpoint",
    ExitCode.INTERRUPTED: "interrupted",
}

# What has been checked: interruption hides everything, damage found counts even if something else was unreadable.
PRECEDENCE = (ExitCode.INTERRUPTED, ExitCode.BAD, ExitCode.FAILED, ExitCode.UNDECIDED, ExitCode.GOOD)

_OF_ERROR: tuple[tuple[type[CkptguardError], ExitCode], ...] = (
    (SettingsError, ExitCode.USAGE),
    (NotFoundError, ExitCode.NOT_FOUND),
    (BusyError, ExitCode.BUSY),
    (RollbackExhausted, ExitCode.EXHAUSTED),
    (NoKnownGoodError, ExitCode.NO_KNOWN_GOOD),
)


def of_error(error: CkptguardError) -> ExitCode:
    """The code of an error; a refused checkpoint has the code of its outcome, anything else is a failure."""
    if isinstance(error, RefusedError):
        return {"bad": ExitCode.BAD, "good": ExitCode.USAGE}.get(error.outcome, ExitCode.UNDECIDED)
    return next((code for kind, code in _OF_ERROR if isinstance(error, kind)), ExitCode.FAILED)


def of_outcomes(outcomes: Iterable[Outcome], *, could_not_tell: bool = False) -> ExitCode:
    """The code of a verification: of everything that was checked the first in `PRECEDENCE`."""
    found = {ExitCode.FAILED} if could_not_tell else set()
    for outcome in outcomes:
        name = outcome.value
        found.add({"good": ExitCode.GOOD, "bad": ExitCode.BAD}.get(name, ExitCode.UNDECIDED))
    # Nothing checked is nothing shown to be good.
    return next((code for code in PRECEDENCE if code in found), ExitCode.UNDECIDED)
