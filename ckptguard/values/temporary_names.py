"""The names of the temporary files and folders that ckptguard makes. Each is made and recognised by the same line."""

from __future__ import annotations

import re
import uuid
from typing import Literal

import msgspec


class TemporaryName(msgspec.Struct, frozen=True):
    """One kind of name: `start`, then `digits` random hexadecimal digits. `kind` is what has such a name.

    At least one digit is a letter: people end names of their own with dates.
    """

    start: str
    digits: int
    kind: Literal["file", "folder", "link", "either"]
    middle: str = ""  # a pattern of what is between the two

    def new(self, middle: str = "") -> str:
        """Return a name that no other process has."""
        while (digits := uuid.uuid4().hex[: self.digits]).isdecimal():
            pass
        return f"{self.start}{middle}{digits}"

    def fits(self, name: str, kind: str | None = None) -> bool:
        """True if `new` may have returned this name, and if this `kind` of entry may have it."""
        if kind is not None and kind not in (("file", "folder") if self.kind == "either" else (self.kind,)):
            return False
        digits = f"(?=[0-9]*[a-f])[0-9a-f]{{{self.digits}}}"
        return re.fullmatch(f"{re.escape(self.start)}{self.middle}{digits}", name) is not None


# In the run, beside its checkpoints.
ROLLBACK = TemporaryName("tmp-rollback-", 8, "folder")
REPAIR = TemporaryName("tmp-repair-", 8, "folder")
SAVE = TemporaryName("tmp-step-", 8, "folder", r"[0-9]{9,}-")
REPLACED = TemporaryName("tmp-replaced-", 8, "folder")  # came back from the trash while its place was taken
ASIDE = TemporaryName("tmp-aside-", 8, "folder")  # not ours: it was in the way of a save, and is never removed
LINK = TemporaryName(".tmp-link-", 8, "link")  # beside a link that gets another target; beside a file it is a RECORD
VISIBLE = TemporaryName("tmp-visible-", 32, "file")
# In the records.
RECORD = TemporaryName(".tmp-", 16, "either")  # a folder that is removed is moved to such a name if it is too deep
NOW = TemporaryName(".tmp-now-", 32, "file")
REPAIR_OF_COPY = TemporaryName(".tmp-repair-", 8, "folder")
SAMPLE = TemporaryName(".tmp-sample-", 8, "file")
DOCTOR = TemporaryName(".tmp-doctor-", 16, "folder")
# In a folder that a user named.
RESTORE = TemporaryName(".tmp-restore-", 8, "folder")

LEFT_IN_RUN = (ROLLBACK, SAVE)
LEFT_IN_RECORDS = (RECORD, NOW, REPAIR_OF_COPY, SAMPLE, DOCTOR)
EVERY = (*LEFT_IN_RUN, LINK, *LEFT_IN_RECORDS, REPAIR, REPLACED, VISIBLE, RESTORE)
