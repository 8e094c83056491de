"""Leave room for the next saves: release what may go, and note what protection is left."""

from __future__ import annotations

from dataclasses import dataclass

from ckptguard.errors import BusyError, CouldNotTellError
from ckptguard.keep.make_room import MadeRoom, release_for_next_saves
from ckptguard.keep.room import measure, room_problem
from ckptguard.records.room import RoomProblem, clear_room_problem, read_room_problem, write_room_problem
from ckptguard.records.run import Run
from ckptguard.retention.prune import empty_trash_early
from ckptguard.runs.free_space import SHARED, file_system_of, free_space
from ckptguard.runs.run_view import RunView

_GROWN = 8  # a pass is made when the free space has grown by such a part of what the next saves need


@dataclass
class RoomNotes:
    """What is remembered about the room of one run between passes."""

    left: tuple[int, int] | None = None  # free and needed bytes after the last pass; None: free bytes are not known
    on_record: RoomProblem | None = None
    has_read: bool = False
    released: tuple[str, ...] = ()  # since the record was written
    missing: int = 0  # bytes that are too few for the next saves, after all that may go was released
    held: bool = False  # and a kept copy alone holds the bytes of the last good save

    def look(self, run: Run) -> tuple[bool, bool]:
        """Return whether there is too little room for the next saves, and whether a pass is to be made because of it:
        to release more, or to make what there was no room for."""
        free, file_system = free_space(run.records), file_system_of(run.records)
        if self.left is None or free is None:
            return False, False
        (free_then, needed_then), needed = self.left, SHARED.needed(file_system, run.url)
        if free < needed + SHARED.links_of(file_system, run.url):
            return True, (free, needed) != self.left
        grown = (free - needed) - (free_then - needed_then)
        return False, self.missing > 0 or (self.on_record is not None and grown > needed // _GROWN)


def leave_room(view: RunView, notes: RoomNotes, size: int = 0) -> list[str]:
    """Release kept copies, then what is in the trash, until the next saves fit, and one of `size` bytes.

    Returns problems as sentences."""
    try:
        made = release_for_next_saves(view, size)
        if made.missing:
            emptied = empty_trash_early(view, lambda: not _still_missing(view, size))
            if emptied:
                made = MadeRoom(released=(*made.released, *emptied), missing=_still_missing(view, size), held=made.held)
    except (BusyError, CouldNotTellError) as error:
        return [f"no room could be made for the next save: {error.message}"]
    notes.released += made.released
    notes.missing, notes.held = made.missing, made.held
    return []


def _still_missing(view: RunView, size: int) -> int:
    room = measure(view)
    return 0 if room.free is None else max(room.needed - room.free, size - room.free, 0)


def note_room(view: RunView, notes: RoomNotes) -> list[str]:
    """Record what protection the run lacks for want of room, or that it lacks nothing. Returns problems."""
    run = view.run
    try:
        if not notes.has_read:
            notes.on_record, notes.has_read = read_room_problem(run), True
        room, problem = measure(view), room_problem(view)
        notes.left = None if room.free is None else (room.free, room.needed)
        before = notes.on_record
        if problem is None:
            if before is not None:
                clear_room_problem(run)
                notes.on_record = None
        elif before is None or before.problem != problem or notes.released:
            released = tuple(dict.fromkeys((*(before.released if before else ()), *notes.released)))
            notes.on_record = RoomProblem(problem=problem, released=released, needed=room.needed, free=room.free or 0)
            write_room_problem(run, notes.on_record)
    except CouldNotTellError as error:
        return [f"what the room is too little for could not be recorded: {error.message}"]
    notes.released = ()
    return []
