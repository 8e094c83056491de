"""The log of this package. Each line of it begins with the package's name, whatever handler prints it.

A training's log has lines of many libraries, and most handlers print the message alone.
"""

from __future__ import annotations

import contextlib
import logging

LEAD = "ckptguard: "
log = logging.getLogger("ckptguard")


def _lead(record: logging.LogRecord) -> bool:
    """Let a record begin with our name. It never raises, and keeps the record's arguments if it is one line."""
    with contextlib.suppress(Exception):  # wrong arguments are reported where the record is formatted
        text = record.getMessage()
        if text.startswith(LEAD):
            return True  # it was here before: a log that other processes send their records to
        if "\n" in text:
            record.msg, record.args = f"\n{LEAD}".join(text.splitlines()), ()
        record.msg = LEAD + str(record.msg)
    return True


log.addFilter(_lead)
