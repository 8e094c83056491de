"""The one table of exit codes: scripts rely on it, every ``--help`` shows it, the documents have it from here."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptguard import errors
from ckptguard.errors import CkptguardError, RefusedError

if TYPE_CHECKING:
    from ckptguard.values.verdict import Outcome


class ExitCode(enum.IntEnum):
    """What the process ends with; the first that applies in the order of `PRECEDENCE`."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    GOOD = 0, "all good"
    FAILED = 1, "could not tell, or the tool failed"
    USAGE = 2, "wrong usage or settings"
    BAD = 3, "something checked is bad"
    UNDECIDED = 4, "nothing bad, but incomplete, pending or suspect"
    NOT_FOUND = 10, "no such run or checkpoint"
    BUSY = 11, "locked, raced, or training is still writing"
    EXHAUSTED = 12, "the rollback budget is spent, or training began from scratch"
    NO_KNOWN_GOOD = 13, "no known-good checkpoint"
    INTERRUPTED = 130, "interrupted"


# What has been checked: interruption hides everything, damage found counts even if something else was unreadable.
PRECEDENCE = (ExitCode.INTERRUPTED, ExitCode.BAD, ExitCode.FAILED, ExitCode.UNDECIDED, ExitCode.GOOD)

_OF_ERROR: tuple[tuple[type[CkptguardError], ExitCode], ...] = (
    (errors.SettingsError, ExitCode.USAGE),
    (errors.NotFoundError, ExitCode.NOT_FOUND),
    (errors.BusyError, ExitCode.BUSY),
    (errors.RollbackExhausted, ExitCode.EXHAUSTED),
    (errors.NoKnownGoodError, ExitCode.NO_KNOWN_GOOD),
)


def of_error(error: CkptguardError) -> ExitCode:
    """The code of an error; a refused checkpoint has the code of its outcome, anything else is a failure."""
    if isinstance(error, RefusedError):
        return {"bad": ExitCode.BAD, "good": ExitCode.USAGE}.get(error.outcome, ExitCode.UNDECIDED)
    return next((code for kind, code in _OF_ERROR if isinstance(error, kind)), ExitCode.FAILED)


def of_outcomes(outcomes: Iterable[Outcome], *, could_not_tell: bool = False) -> ExitCode:
    """The code of a verification: of everything that was checked the first in `PRECEDENCE`."""
    decided = {"good": ExitCode.GOOD, "bad": ExitCode.BAD}
    found = {decided.get(outcome.value, ExitCode.UNDECIDED) for outcome in outcomes}
    if could_not_tell:
        found.add(ExitCode.FAILED)
    # Nothing checked is nothing shown to be good.
    return next((code for code in PRECEDENCE if code in found), ExitCode.UNDECIDED)
