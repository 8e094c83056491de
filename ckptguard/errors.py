"""Every exception that ckptguard raises, in one tree.

::

    CkptguardError
    ├── SettingsError           a setting that cannot be true
    ├── NotFoundError           no such run or checkpoint
    ├── NoKnownGoodError        nothing that was verified good is present
    ├── BusyError               locked, raced, or training is still writing
    ├── RefusedError            would hand out a bad or suspect checkpoint; needs force
    ├── RollbackExhausted       the rollback budget is spent
    ├── SickTrainingError       training was stopped because its state is sick
    ├── StateError              training state that cannot be saved or put back exactly
    ├── RanksError              a rank of a training failed, or did not answer in time
    └── CouldNotTellError       reading failed; it says nothing about the bytes: never BAD, never GOOD
        ├── ChangedWhileReadError   a file changed or vanished under the reader
        │   └── ResavingError       a checkpoint is being saved again, and not all of its files are new yet
        ├── RecordsError            our own records cannot be used (a newer format, a damaged file)
        ├── WorkerError             the scanning process died or ran out of its limits
        └── StorageError            the storage refused or failed
            ├── ObjectMissingError
            ├── ObjectExistsError
            ├── DeniedError
            ├── StorageFullError
            ├── TransientError          a failure that may pass: worth another try
            └── StoppedError            waiting for another try was called off

Bad data is never an exception: it is a verdict. ``kind`` is stable for machines, ``hint`` is for people.
Every one of them can be copied, pickled and sent to another process, and keeps all its fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CkptguardError(Exception):
    """Base of all errors here; `kind` is stable, `hint` says what to do, `fields` carry the evidence."""

    kind = "error"

    def __init__(self, message: str, *, hint: str | None = None, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = fields

    def __reduce__(self) -> tuple[Callable[..., CkptguardError], tuple[object, ...]]:
        # Exception's own would call the class with `args` alone, and fail where a field must be named.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[CkptguardError], args: tuple[object, ...], fields: dict[str, Any]) -> CkptguardError:
    """An error as it was, without a call of its `__init__`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class SettingsError(CkptguardError):
    """A setting that cannot be true."""

    kind = "settings"


class NotFoundError(CkptguardError):
    """No such run or checkpoint."""

    kind = "not_found"


class NoKnownGoodError(CkptguardError):
    """No checkpoint that was verified good is present."""

    kind = "no_known_good"


class BusyError(CkptguardError):
    """Locked, raced by another process, or training is still writing."""

    kind = "busy"


class RefusedError(CkptguardError):
    """The checkpoint is bad or suspect; only force hands it out. `outcome` says which."""

    kind = "refused"

    def __init__(self, message: str, *, outcome: str, hint: str | None = None, **fields: object) -> None:
        super().__init__(message, hint=hint, **fields)
        self.outcome = outcome


class RollbackExhausted(CkptguardError):
    """The rollback budget is spent; `report` is the path of the last incident's report."""

    kind = "rollback_exhausted"

    def __init__(self, message: str, *, report: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.report = report


class SickTrainingError(CkptguardError):
    """Training was stopped because its state is sick; `known_good` is the path to go back to, if there is one."""

    kind = "sick_training"

    def __init__(self, message: str, *, known_good: str | None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.known_good = known_good


class StateError(CkptguardError):
    """Training state that cannot be saved or put back exactly."""

    kind = "state"


class RanksError(CkptguardError):
    """A rank of a training failed, or did not answer in time; the message names it."""

    kind = "ranks"


class CouldNotTellError(CkptguardError):
    """Reading failed. It says nothing about the bytes, so it is neither BAD nor GOOD."""

    kind = "could_not_tell"


class RecordsError(CouldNotTellError):
    """Our own records cannot be used: written by a newer format, or damaged. It says nothing about a checkpoint."""

    kind = "records"


class ChangedWhileReadError(CouldNotTellError):
    """A file changed or vanished while it was read."""

    kind = "changed"

    def __init__(self, message: str, *, key: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.key = key


class ResavingError(ChangedWhileReadError):
    """A sealed checkpoint is being saved again: some of its files are new, others are not yet."""

    kind = "resaving"


class WorkerError(CouldNotTellError):
    """The scanning process died, or ran out of its memory or time."""

    kind = "worker"


class StorageError(CouldNotTellError):
    """The storage refused or failed; `key` is the object concerned."""

    kind = "storage"

    def __init__(self, message: str, *, key: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.key = key


class ObjectMissingError(StorageError):
    """No object under this key."""

    kind = "missing"


class ObjectExistsError(StorageError):
    """An exclusive create found the key taken."""

    kind = "exists"


class DeniedError(StorageError):
    """No permission."""

    kind = "denied"


class StorageFullError(StorageError):
    """No space left, or a quota is used up."""

    kind = "full"


class TransientError(StorageError):
    """The storage failed in a way that may pass: a timeout, a reset, "slow down". Worth another try."""

    kind = "transient"


class StoppedError(StorageError):
    """Waiting for another try was called off; nothing was written since."""

    kind = "stopped"
