"""Room for a save: kept copies and the trash are released before a save fails."""

from __future__ import annotations

from typing import Any

from ckptguard.runs.free_space import file_system_of, free_space, need_room
from ckptguard.runs.run_view import RunView
from ckptguard.upkeep.room import RoomNotes, leave_room


def room_for(view: RunView, size: int, what: str, **waiting: Any) -> None:
    """Release kept copies and empty the trash if fewer than `size` bytes are free. Then do as `need_room` does.

    The bytes of one good save stay.

    Raises:
        StorageFullError: fewer than `size` bytes are free all the same, and it may not wait.
    """
    storage, records = view.run.storage, view.run.records
    free = free_space(storage)
    if free is not None and free < size and file_system_of(storage) == file_system_of(records):
        leave_room(view, RoomNotes(), size)
    need_room(storage, size, what, **waiting)
