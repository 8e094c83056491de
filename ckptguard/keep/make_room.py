"""Release kept copies, so that the next save of a trainer fits."""

from __future__ import annotations

import contextlib
import dataclasses

import msgspec

from ckptguard.decisions.room import to_release
from ckptguard.errors import ChangedWhileReadError, ObjectMissingError
from ckptguard.keep.copies import keep_checkpoint, release, release_unpinned
from ckptguard.keep.room import HeldCopy, Room, held_copies, measure, newest_good, newest_whole
from ckptguard.keep.saved_over import keeps_old_bytes
from ckptguard.records.kept import read_kept, read_set_aside
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.free_space import SHARED
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_view import RunView


class MadeRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What was released: the paths of the saves whose copies went, and their bytes. `missing`: the bytes that the
    next saves still lack. `held`: the last good save's bytes are in a kept copy alone."""

    released: tuple[str, ...] = ()
    missing: int = 0
    held: bool = False


def release_for_next_saves(view: RunView, size: int = 0) -> MadeRoom:
    """Release kept copies until the next saves of all runs on the file system fit, and `size` bytes, oldest first.

    The bytes of one good save of each series stay. They are in a kept copy, or, if even that is too little room, where
    the trainer saved them.

    Raises:
        BusyError: another process holds the run.
        CouldNotTellError: the run or its records cannot be read.
    """
    room = _measure(view, size)
    if room.ample or room.free is None:
        return MadeRoom()
    held = held_copies(view)
    if _missing(room, held) <= 0:
        SHARED.note_links(room.file_system, view.run.url, _later(held))
        return MadeRoom()
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
    return MadeRoom(released=tuple(dict.fromkeys(released)), missing=max(_missing(room, held), 0), held=stays)


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
