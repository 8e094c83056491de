"""Measure the room for kept copies: they may take only what the next saves of the trainers leave.

A hard link counts as a copy, because it holds its bytes once the trainer deletes its own name.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptguard.decisions.room import Held, SeriesSaves, next_save
from ckptguard.keep.saved_over import freed_before_writing, keeps_old_bytes
from ckptguard.layouts import Checkpoint
from ckptguard.records.kept import KeptCopy, list_kept, list_set_aside, read_kept, read_set_aside
from ckptguard.records.pins import pinned_generations
from ckptguard.records.run import Run
from ckptguard.runs.free_space import SHARED, file_system_of, free_space
from ckptguard.runs.good_checkpoint import Presence
from ckptguard.runs.run_view import RunView, SeriesInPlace
from ckptguard.runs.saved_together import RememberedSaves, answers, joined_in
from ckptguard.runs.sealed_content import kept_matches
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome

_NOT_ENOUGH = "not enough room: "
_BLOCK = 512  # the unit of st_blocks, whatever the file system's block size


@dataclass(frozen=True)
class Room:
    """The free bytes where kept copies are made, and those that must stay free. `free` is None if it is not known.

    `ample`: there is room for every copy that may be made.
    """

    free: int | None
    needed: int
    file_system: str
    ample: bool


@dataclass(frozen=True)
class HeldCopy:
    """A kept copy, and what it holds."""

    id: CheckpointId
    copy: KeptCopy
    held: Held


def measure(view: RunView) -> Room:
    """Return the room now. Others are told what this run's next save needs.

    Raises:
        CouldNotTellError: the run cannot be listed.
    """
    run, settings = view.run, view.settings
    free, file_system = free_space(run.records), file_system_of(run.records)
    if free is None:
        return Room(None, 0, file_system, ample=True)
    saves = view.listing.series
    where = file_system if run.records_inside else file_system_of(run.storage)
    needs = {series: own.largest for series, own in saves.items()}
    _note(run, where, saves, needs)
    copies = (settings.keep_good + settings.keep_pending + 1) * sum(needs.values())
    in_place = sum(own.bytes for own in saves.values())
    needed = SHARED.needed(file_system, run.url)
    full = SHARED.is_full(file_system)
    if not full and free >= needed + copies + min(copies, in_place):
        SHARED.note_links(file_system, run.url, 0)
        return Room(free, needed, file_system, ample=True)
    for series, own in saves.items():
        if len(own.checkpoints) == 1:
            needs[series] -= freed_before_writing(view, own.checkpoints[0])
    _note(run, where, saves, needs)
    return Room(free, SHARED.needed(file_system, run.url), file_system, ample=False)


def _note(run: Run, file_system: str, saves: dict[str, SeriesInPlace], needs: dict[str, int]) -> None:
    series = [SeriesSaves(bytes=needs[name], saved_at=own.saved_at) for name, own in saves.items()]
    SHARED.note_save(file_system, run.url, next_save(series))


def fits(view: RunView, size: int, *, independent: bool) -> bool:
    """True if the next saves still fit after a copy of this size. `independent`: it is to be a full copy.

    Full copies are not tried for some time after a write failed for lack of space.
    """
    room = measure(view)
    if room.ample or room.free is None:
        return True
    if independent and SHARED.is_full(room.file_system):
        return False
    later = sum(one.held.later for one in held_copies(view) if not one.held.stays)
    return room.free - later - size >= room.needed


def held_copies(view: RunView) -> list[HeldCopy]:
    """Return the kept copies of a run, the oldest first. These stay: pinned ones, and in each series the bytes of one
    good save, which is the newest that has safe ones. Of series that are saved together that is one whole save."""
    run = view.run
    if not run.has_shared:
        return []
    pinned, back = pinned_generations(run), way_back(view)
    found: list[HeldCopy] = []
    for _, ids in itertools.groupby(list_kept(run), key=lambda id: id.series):
        newest_first = sorted(ids, key=lambda id: id.order, reverse=True)
        copies = [copy for id in newest_first if (copy := read_kept(run, id)) is not None]
        own = back.get(copies[0].series) if copies else None
        last = frozenset((_last_good(view, copies),)) if own is None else own
        for copy in copies:
            now = _bytes_alone(view, copy)
            held = Held(now=now, later=max(copy.bytes - now, 0), stays=copy.id in last or copy.id in pinned)
            found.append(HeldCopy(copy.id, copy, held))
    for id in list_set_aside(run):  # of a checkpoint that needs a repair
        aside = read_set_aside(run, id)
        if aside is not None:
            needed = not any(one.held.stays and one.id.series == id.series for one in found)
            held = Held(now=own_bytes(run, aside) or 0, later=0, stays=needed or id in pinned)
            found.append(HeldCopy(id, aside, held))
    return sorted(found, key=lambda one: (one.copy.kept_at, one.id.series, one.id.order))


def way_back(view: RunView) -> dict[str, frozenset[CheckpointId]]:
    """Return for each series that is saved together with others the parts of the good save that must stay: the newest
    of which no part can be written into by a save, else the newest."""
    source, found = RememberedSaves(view.reader), dict[str, frozenset[CheckpointId]]()
    for group in joined_in(source):
        saves = [answer for answer, _ in itertools.islice(answers(source, group), view.settings.keep_good + 1)]
        safe = (save for save in saves if all(_is_safe(view, part) for part, _ in save.parts))
        best = next(safe, saves[0] if saves else None)
        if best is not None:
            found |= dict.fromkeys(group.names, frozenset(part.id for part, _ in best.parts))
    return found


def newest_whole(view: RunView) -> dict[str, frozenset[CheckpointId]]:
    """Return for each series that is saved together with others the parts of the newest good save."""
    source, found = RememberedSaves(view.reader), dict[str, frozenset[CheckpointId]]()
    for group in joined_in(source):
        for answer, _ in itertools.islice(answers(source, group), 1):
            found |= dict.fromkeys(group.names, frozenset(part.id for part, _ in answer.parts))
    return found


def _is_safe(view: RunView, part: Presence) -> bool:
    copy = read_kept(view.run, part.id)
    return copy is not None and has_safe_bytes(view, copy)


def room_problem(view: RunView) -> str | None:
    """Return what kept copies a run lacks because there is no room for them, as a sentence, or None."""
    settings = view.settings
    room = measure(view)
    if room.ample or room.free is None or settings.keep == "none":
        return None
    kept: dict[str, list[KeptCopy]] = {}
    for one in held_copies(view):
        if view.is_good(one.id):
            kept.setdefault(one.id.series, []).append(one.copy)
    for copies in kept.values():
        copies.sort(key=lambda copy: copy.id.order)
    for series, own in view.listing.series.items():
        copies, size = kept.get(series, []), own.largest
        good = {id for c in own.checkpoints if (id := view.current_if_readable(c)) is not None and view.is_good(id)}
        full = any(copy.how != "link" for copy in copies)
        linked = bool(good) and all(copy.how == "link" for copy in copies[-1:])  # the newest one, or there is none
        if linked and settings.keep != "link" and not fits(view, size, independent=True):
            return _NOT_ENOUGH + ("one copy only" if full else "no copy, only a hard link" if copies else "no copy")
        # Also while there are fewer good saves than that: between two saves it would be said again each time.
        if (good or copies) and len(copies) < settings.keep_good and not fits(view, size, independent=False):
            return _NOT_ENOUGH + ("one copy only" if copies else "no copy")
    return None


def newest_good(view: RunView, series: str) -> CheckpointId | None:
    """Return the newest generation of a series whose verdict is GOOD, if there is one that was not thinned."""
    good = (s.id for s in view.history.current_verdicts(series).values() if s.outcome is Outcome.GOOD)
    return next(full_first(view, sorted(good, key=lambda id: id.order, reverse=True)), None)


def full_first(view: RunView, ids: Iterable[CheckpointId]) -> Iterator[CheckpointId]:
    """Yield checkpoints in their order, but the thinned ones last: none takes the place of one to resume from."""
    thinned = []
    for id in ids:
        sealed = view.reader.sealed(id)
        if sealed is not None and sealed.thinned:
            thinned.append(id)
        else:
            yield id
    yield from thinned


def may_link(view: RunView, checkpoint: Checkpoint, id: CheckpointId) -> bool:
    """True if a link to a checkpoint in place needs no room: it is the newest good save, no save writes into its files,
    and the next saves fit before the trainer deletes it."""
    room = measure(view)
    if id != newest_good(view, id.series) or (room.free is not None and room.free < room.needed):
        return False
    return keeps_old_bytes(view, id.series, id.step, checkpoint.path)


def _last_good(view: RunView, newest_first: list[KeptCopy]) -> CheckpointId | None:
    """Return the copy of a series without which no good save would surely have its bytes: the newest that no save can
    write into, or else the newest link."""
    link: CheckpointId | None = None
    copies = {copy.id: copy for copy in newest_first}
    for copy in map(copies.__getitem__, full_first(view, copies)):
        manifest = view.history.manifest(copy.id)
        if manifest is None or not view.is_good(copy.id) or not kept_matches(view.run, copy, manifest):
            continue
        if has_safe_bytes(view, copy):
            return copy.id
        link = link or copy.id
    return link


def has_safe_bytes(view: RunView, copy: KeptCopy) -> bool:
    """True if no save can write into the files of a kept copy: they are its own, or the trainer replaces its files."""
    if copy.how != "link" or keeps_old_bytes(view, copy.series, copy.step, copy.path):
        return True
    return not any(_is_shared(view.run, copy, file) for file in copy.files)


def _is_shared(run: Run, copy: KeptCopy, file: str) -> bool:
    kept, there = find_entry(run.records, copy.key(file)), find_entry(run.storage, file)
    return kept is None or (there is not None and (kept.inode is None or kept.inode == there.inode))


def _bytes_alone(view: RunView, copy: KeptCopy) -> int:
    """Return what the release of a copy frees. A reflink shares its blocks with the files in place, if they are there
    unchanged."""
    known = own_bytes(view.run, copy)
    if known is not None:
        return known
    place = view.checkpoint(copy.path)
    return 0 if place is not None and copy.lies_in(place.entries) else copy.bytes


def own_bytes(run: Run, copy: KeptCopy) -> int | None:
    """Return the bytes that only this kept copy occupies, or None if the file system does not say what reflinks share.

    A hard link costs nothing while the file has another name. If a server does not report links, equal sizes and times
    count as a link.
    """
    if copy.how == "reflink":
        from ckptguard.storage.local.shared_extents import unshared_bytes  # few file systems have reflinks

        alone = [unshared_bytes(run.records.path_of(copy.key(file))) for file in copy.files]
        return None if None in alone else sum(filter(None, alone))
    total = 0
    for file in copy.files:
        if run.records.root is None:
            kept = find_entry(run.records, copy.key(file))
            if kept is not None and not (copy.how == "link" and _looks_linked(run, file, kept)):
                total += kept.size
            continue
        try:
            info = os.lstat(run.records.path_of(copy.key(file)))
        except OSError:
            continue
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
            total += info.st_blocks * _BLOCK
    return total


def _looks_linked(run: Run, file: str, kept: Entry) -> bool:
    there = find_entry(run.storage, file) if kept.mtime_ns is not None else None
    return there is not None and (there.size, there.mtime_ns) == (kept.size, kept.mtime_ns)
