"""Leave room for the next saves: release what may go, and note what protection is left."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

from ckptguard.decisions.room import to_release
from ckptguard.errors import ChangedWhileReadError, ObjectMissingError
from ckptguard.keep.copies import keep_checkpoint, release, release_unpinned
from ckptguard.keep.room import HeldCopy, Room, held_copies, measure, newest_good, newest_whole, room_problem
from ckptguard.keep.saved_over import keeps_old_bytes
from ckptguard.records.kept import read_kept, read_set_aside
from ckptguard.records.room import RoomProblem, clear_room_problem, read_room_problem, write_room_problem
from ckptguard.records.run import Run
from ckptguard.retention.prune import empty_trash_early
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.free_space import SHARED, file_system_of, free_space
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import noted

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
    troubles: list[str] = []
    with noted(troubles, "no room could be made for the next save"):
        released, missing, held = _release_for_next_saves(view, size)
        if missing:
            emptied = empty_trash_early(view, lambda: not _still_missing(view, size))
            released, missing = [*released, *emptied], _still_missing(view, size) if emptied else missing
        notes.released += tuple(dict.fromkeys(released))
        notes.missing, notes.held = missing, held
    return troubles


def _still_missing(view: RunView, size: int) -> int:
    room = measure(view)
    return 0 if room.free is None else max(room.needed - room.free, size - room.free, 0)


def note_room(view: RunView, notes: RoomNotes) -> list[str]:
    """Record what protection the run lacks for want of room, or that it lacks nothing. Returns problems."""
    run = view.run
    troubles: list[str] = []
    with noted(troubles, "what the room is too little for could not be recorded"):
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
        notes.released = ()
    return troubles


def _release_for_next_saves(view: RunView, size: int) -> tuple[list[str], int, bool]:
    """Release kept copies until the next saves of all runs on the file system fit, and `size` bytes, oldest first.

    The bytes of one good save of each series stay. They are in a kept copy, or, if even that is too little room, where
    the trainer saved them. Returns the paths whose copies were released, the bytes that the next saves still lack, and
    whether the last good save's bytes are in a kept copy alone. Raises BusyError and CouldNotTellError.
    """
    room = _measure(view, size)
    if room.ample or room.free is None:
        return [], 0, False
    held = held_copies(view)
    if _missing(room, held) <= 0:
        SHARED.note_links(room.file_system, view.run.url, _later(held))
        return [], 0, False
    with run_lock(view.run):
        view.refresh()
        _link_newest_good(view)
        released: list[str] = []
        held = held_copies(view)
        for number in to_release([one.held for one in held], room.free, room.needed):
            released += _release(view, held[number])
        room, held = _measure(view, size), held_copies(view)
        if _missing(room, held) > 0:
            released += [one.copy.path for one in held if _leave_in_place(view, one)]
            room, held = _measure(view, size), held_copies(view)
    SHARED.note_links(room.file_system, view.run.url, _later(held))
    stays = any(one.held.stays and one.held.now for one in held)
    return released, max(_missing(room, held), 0), stays


def _measure(view: RunView, size: int) -> Room:
    room = measure(view)
    enough = room.free is None or room.free >= size
    return dataclasses.replace(room, needed=max(room.needed, size), ample=room.ample and enough)


def _later(held: list[HeldCopy]) -> int:
    return sum(one.held.later for one in held if not one.held.stays)


def _missing(room: Room, held: list[HeldCopy]) -> int:
    return room.needed - (room.free or 0) + _later(held)


def _release(view: RunView, one: HeldCopy) -> list[str]:
    if read_set_aside(view.run, one.id) is not None:
        release(view.run, one.id)
        return [one.copy.path]
    return [one.copy.path] if release_unpinned(view.run, [one.id]) else []


def _link_newest_good(view: RunView) -> None:
    """Let the newest good save of each series, or of those that are saved together, be in a kept copy, so that older
    ones may go. That takes no space."""
    saves = newest_whole(view)
    for checkpoint in view.checkpoints:
        id = view.current_if_readable(checkpoint)
        if id is None or read_kept(view.run, id) is not None:
            continue
        if id not in saves.get(id.series, frozenset((newest_good(view, id.series),))):
            continue
        manifest = view.history.manifest(id)
        if manifest is not None and looks_as_read(checkpoint.entries, manifest, view.history.verdict(id)):
            try:
                keep_checkpoint(view, checkpoint, id, how="link", always=True)
            except (ChangedWhileReadError, ObjectMissingError):
                continue  # the trainer replaced or deleted it meanwhile: an older copy stays


def _leave_in_place(view: RunView, one: HeldCopy) -> bool:
    """Release the last copy of a good save if no save can write into its files in place. A link to these is made where
    the next saves fit then."""
    copy, place, manifest = one.copy, view.look_again(one.copy.path), view.history.manifest(one.id)
    if not one.held.stays or place is None or manifest is None:
        return False
    if not looks_as_read(place.entries, manifest, view.history.verdict(copy.id)):
        return False
    if not keeps_old_bytes(view, copy.series, copy.step, copy.path):
        return False
    if not release_unpinned(view.run, [copy.id]):
        return False
    with contextlib.suppress(ChangedWhileReadError, ObjectMissingError):
        keep_checkpoint(view, place, copy.id, how="link")
    return True
