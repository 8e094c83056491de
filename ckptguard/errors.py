"""Every exception that ckptguard raises, in one tree.

Bad data is never an exception: it is a verdict. ``kind`` is stable for machines, ``hint`` is for people. Every
exception can be copied, pickled and sent to another process, with all its fields.
"""

from __future__ import annotations

import copyreg
from typing import Any


class CkptguardError(Exception):
    """Base of all errors here. `kind` is stable, `hint` says what to do next, `fields` carry the evidence."""

    kind = "error"

    def __init_subclass__(cls, *, kind: str | None = None) -> None:
        super().__init_subclass__()
        if kind is not None:
            cls.kind = kind

    def __init__(self, message: str, *, hint: str | None = None, **fields: object) -> None:
        super().__init__(message)
        if hint:
            self.add_note(f"hint: {hint}")  # tracebacks show notes, and nothing else of it
        self.message = message
        self.hint = hint
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own would call the class with `args` alone, and fail for a required keyword.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


FORCE = "--force (in Python: force=True)"  # how a hint names what both can say


class SettingsError(CkptguardError, kind="settings"):
    """A setting has an impossible value."""


class NotFoundError(CkptguardError, kind="not_found"):
    """The run or checkpoint does not exist."""


class NoKnownGoodError(CkptguardError, kind="no_known_good"):
    """There is no checkpoint that was verified good."""


class NotGivenBackError(NoKnownGoodError, kind="not_given_back"):
    """After a rollback, a name that training may resume from could hold nothing good. Nothing was moved."""


class BusyError(CkptguardError, kind="busy"):
    """Something is locked, another process was faster, or training is still writing."""


class PlanChangedError(CkptguardError, kind="plan_changed"):
    """What would be done is no longer what was agreed to. Nothing was done."""


class RefusedError(CkptguardError, kind="refused"):
    """The checkpoint is bad or suspect, so only force returns it. `outcome` says which."""

    def __init__(self, message: str, *, outcome: str, hint: str | None = None, **fields: object) -> None:
        super().__init__(message, hint=hint, **fields)
        self.outcome = outcome


class RollbackExhausted(CkptguardError, kind="rollback_exhausted"):
    """The rollback budget is spent. `report` is the path of the last incident's report."""

    def __init__(self, message: str, *, report: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.report = report


class SickTrainingError(CkptguardError, kind="sick_training"):
    """Training was stopped because its state is sick. `known_good` is the path to go back to, if there is one."""

    def __init__(self, message: str, *, known_good: str | None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.known_good = known_good


class StateError(CkptguardError, kind="state"):
    """Training state cannot be saved or restored exactly."""


class RanksError(CkptguardError, kind="ranks"):
    """A rank of a training failed, or did not answer in time. The message names it."""


class CouldNotTellError(CkptguardError, kind="could_not_tell"):
    """Reading failed. This says nothing about the bytes, so it is neither BAD nor GOOD."""


class ChecksumFileError(CouldNotTellError):
    """A checksum file that is about a checkpoint cannot be used."""


class NotUnderstoodError(CouldNotTellError):
    """No format of ours explains a file, and nothing vouches for its content."""


class RecordsError(CouldNotTellError, kind="records"):
    """Our own records cannot be used: a newer format, or damage. This says nothing about a checkpoint."""


class ChangedWhileReadError(CouldNotTellError, kind="changed"):
    """A file changed or vanished while it was read."""

    def __init__(self, message: str, *, key: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.key = key


class ResavingError(ChangedWhileReadError, kind="resaving"):
    """A sealed checkpoint is being saved again: some of its files are new, others not yet."""


class WorkerError(CouldNotTellError, kind="worker"):
    """The scanning process died, or ran out of memory or time."""


class StorageError(CouldNotTellError, kind="storage"):
    """The storage refused or failed. `key` names the object."""

    def __init__(self, message: str, *, key: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.key = key


class ObjectMissingError(StorageError, kind="missing"):
    """No object exists at this key."""


class RunRemovedError(ObjectMissingError, kind="removed"):
    """Somebody removed the run, or is removing it, so nothing was written."""


class ObjectExistsError(StorageError, kind="exists"):
    """An exclusive create found the key taken."""


class DeniedError(StorageError, kind="denied"):
    """Permission was denied."""


class StorageFullError(StorageError, kind="full"):
    """No space left, or a quota is used up."""


class TransientError(StorageError, kind="transient"):
    """The storage failed in a way that may pass: a timeout, a reset, "slow down". A retry may help."""


class StoppedError(StorageError, kind="stopped"):
    """Waiting for a retry was stopped. Nothing was written since."""
