"""What the supervises of one job tell each other, one on each node: who leads, who is there, and what each is to do.

One lease in the run says who leads. All else of a session is in a folder of its own, and goes when the session ends.
"""

from __future__ import annotations

import contextlib
from typing import ClassVar

import msgspec

from ckptguard.errors import CouldNotTellError, ObjectExistsError, ObjectMissingError, RecordsError
from ckptguard.records.leases import Lease, new_lease, release, surely_gone, take
from ckptguard.records.run import Run, create_record, list_records, read_parsed, read_sound

FOLDER = "nodes"
_LEADER = f"{FOLDER}/leader.json"
_TRIES = 5


class Leader(Lease, frozen=True, kw_only=True):
    """The supervise that goes back for all of a `group`, which has `size` of them. Its token names the session."""

    silence: ClassVar[float | None] = 60.0

    group: str
    size: int

    @property
    def key(self) -> str:
        """The record's key: one for each run."""
        return _LEADER


class MemberLease(Lease, frozen=True, kw_only=True):
    """One supervise of a session. `rank` is its number in the group."""

    silence: ClassVar[float | None] = 60.0

    session: str
    rank: int

    @property
    def key(self) -> str:
        """The record's key: one for each rank."""
        return f"{FOLDER}/{self.session}/member.{self.rank}.json"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What all do next: start the command, or end with this exit code."""

    start: bool
    status: int = 0
    why: str = ""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the command ended on one node, or why all are to stop theirs. `asked`: somebody asked that node to end."""

    rank: int
    host: str
    status: int
    asked: bool = False
    why: str = ""


def lead(run: Run, group: str, size: int) -> tuple[Leader, bool]:
    """Return who leads this group, and whether it is this process. Raises StorageError, or CouldNotTellError if leaders
    keep changing."""
    mine = new_lease(Leader, group=group, size=size)
    for _ in range(_TRIES):
        if take(run, mine):
            for name in list_records(run, FOLDER, recursive=True):
                if name.partition("/")[0] not in ("leader.json", mine.token):
                    _remove(run, f"{FOLDER}/{name}")  # of sessions that were killed
            return mine, True
        other = None
        with contextlib.suppress(RecordsError):
            other = read_parsed(run, _LEADER, Leader, "a leader")
            if other is None:
                continue
        if other is not None and not surely_gone(run, other):
            return other, False
        _remove(run, _LEADER)
    raise CouldNotTellError(f"the supervises of {run.url} keep changing")


def is_led(run: Run) -> bool:
    """True if the supervises of a job on several nodes may be at work."""
    leader = read_sound(run, _LEADER, Leader, "a leader")
    return leader is not None and not surely_gone(run, leader)


def tell(run: Run, session: str, name: str, value: Order | NodeReport) -> None:
    """Write what all of a session read. What is there already stays. Raises StorageError."""
    with contextlib.suppress(ObjectExistsError):
        create_record(run, f"{FOLDER}/{session}/{name}.json", value)


def names_in_session(run: Run, session: str) -> set[str]:
    """Return the names of what was told in a session. Raises StorageError."""
    run.records.renew()
    return {name.removesuffix(".json") for name in list_records(run, f"{FOLDER}/{session}")}


def read_order(run: Run, session: str, name: str) -> Order | None:
    """Return an order, or None if it cannot be read yet."""
    return read_sound(run, f"{FOLDER}/{session}/{name}.json", Order, "an order")


def read_report(run: Run, session: str, name: str) -> NodeReport | None:
    """Return a report, or None if it cannot be read yet."""
    return read_sound(run, f"{FOLDER}/{session}/{name}.json", NodeReport, "a report")


def member_of(run: Run, session: str, rank: int) -> MemberLease | None:
    """Return the member with this rank, or None."""
    return read_sound(run, f"{FOLDER}/{session}/member.{rank}.json", MemberLease, "a member")


def dissolve(run: Run, leader: Leader) -> None:
    """End a session: remove all that was told in it, and its leader. Never raises."""
    with contextlib.suppress(CouldNotTellError):
        for name in list_records(run, f"{FOLDER}/{leader.token}"):
            _remove(run, f"{FOLDER}/{leader.token}/{name}")
        release(run, leader)


def _remove(run: Run, key: str) -> None:
    with contextlib.suppress(ObjectMissingError):
        run.records.remove(key)
