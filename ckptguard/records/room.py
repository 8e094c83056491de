"""What a run lacks because there is too little room, on record: what was released, and what protection is left."""

from __future__ import annotations

import msgspec

from ckptguard.records.run import Run, begin_records_elsewhere, read_sound, replace_record
from ckptguard.records.who_and_when import utc_now
from ckptguard.values.record_formats import PLAIN

_KEY = "room.json"
_MOST = 20  # paths on record


class RoomProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run has fewer kept copies than its settings ask for. `released`: the paths of the saves whose copies were
    released, the last ones last. `at`: when this was last noted."""

    problem: str
    released: tuple[str, ...] = ()
    needed: int = 0
    free: int = 0
    at: str = ""
    format: int = PLAIN.writes


def read_room_problem(run: Run) -> RoomProblem | None:
    """Return what the run lacks, or None. A record that cannot be read says nothing."""
    return read_sound(run, _KEY, RoomProblem, "the record of too little room")


def write_room_problem(run: Run, problem: RoomProblem) -> None:
    """Note what the run lacks, in place of what was noted before."""
    begin_records_elsewhere(run)
    replace_record(run, _KEY, msgspec.structs.replace(problem, released=problem.released[-_MOST:], at=utc_now()))


def clear_room_problem(run: Run) -> None:
    """Note that the run lacks nothing."""
    run.records.remove(_KEY)
