"""Which format of each record this release reads and writes, and which the release before it does.

A release writes nothing that the release before it cannot read. Only a person raises the format of a run's records.
Fields may be added at any time: readers ignore those that they do not know.
"""

from __future__ import annotations

from typing import NamedTuple

FORMAT_KEY = "format.json"  # of a run's records


class RecordFormat(NamedTuple):
    """The formats of one kind of record. A release that reads a format reads all earlier ones."""

    writes: int
    reads: int
    before_writes: int  # by the release before
    before_reads: int


RECORDS = RecordFormat(writes=2, reads=2, before_writes=2, before_reads=2)  # of a run; it may state another one
MANIFEST = RecordFormat(writes=2, reads=2, before_writes=2, before_reads=2)
VERDICT = RecordFormat(writes=3, reads=3, before_writes=3, before_reads=3)
MARK = RecordFormat(writes=2, reads=2, before_writes=2, before_reads=2)
SAMPLES = RecordFormat(writes=1, reads=1, before_writes=1, before_reads=1)
ACTION = RecordFormat(writes=1, reads=1, before_writes=1, before_reads=1)
# Its readers look at no number. So it stays 1: what they must not overlook needs a new format of the run's records.
PLAIN = RecordFormat(writes=1, reads=1, before_writes=1, before_reads=1)

# By the names that the documentation has for them.
TABLE = {
    "`format.json`": RECORDS,
    "manifests": MANIFEST,
    "verdicts": VERDICT,
    "marks of kept copies, of quarantine and of the trash": MARK,
    "samples": SAMPLES,
    "audit": ACTION,
    "all others": PLAIN,
}
# What a person allows by raising a run from the format before it.
CHANGES = {
    2: "on a local disk, new records have names that no trainer's search matches; versions before 0.1 refuse the run",
}
