"""Collect what was put aside: damaged bytes that are of no use any more, and what came back from the trash too late."""

from __future__ import annotations

import itertools
import re

from ckptguard.errors import ObjectMissingError
from ckptguard.records.kept import read_set_aside
from ckptguard.records.pins import list_pins
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run, list_records
from ckptguard.records.trash import read_trash
from ckptguard.records.who_and_when import forget_sightings, seen_for, this_host
from ckptguard.runs.find_known_good import Wanted, known_good_candidates
from ckptguard.runs.run_view import RunView
from ckptguard.storage import Entry
from ckptguard.values.ids import CheckpointId, id_from_record
from ckptguard.values.verdict import Outcome

_DAMAGED = re.compile(r"(?P<id>.+)\.damaged-[0-9a-f]{8}")
_REPLACED = re.compile(r"tmp-replaced-[0-9a-f]{8}")


def expire_aside(view: RunView, grace: float) -> list[str]:
    """Remove, after `grace` seconds, damaged bytes whose checkpoint was good again all that time, and what was put back
    from the trash when its place was taken again; returns their keys. While a checkpoint is not good its damaged bytes
    stay.

    The time is measured by this machine's own clock from when it was first seen so, by a call of this; what it has seen
    of other machines' marks and pins is noted too. The caller holds the run's lock.
    """
    run = view.run
    damaged = {key for key, id in _damaged(run) if _has_no_use(view, key, id)}
    replaced = {e.key for e in _beside(run) if _REPLACED.fullmatch(e.name)}
    removed = []
    for storage, keys in ((run.records, damaged), (run.storage, replaced)):
        for key in sorted(keys):
            if (seen_for(run, key, note=True) or 0.0) > grace:
                storage.remove(key)
                removed.append(key)
    elsewhere = _marks_of_others(run)
    for key in elsewhere:
        seen_for(run, key, note=True)
    forget_sightings(run, (damaged | replaced | elsewhere) - set(removed))
    return removed


def _damaged(run: Run) -> list[tuple[str, CheckpointId]]:
    """Every folder of damaged bytes: its key, and of which checkpoint they were."""
    found = []
    for folder in list_records(run, QUARANTINE):
        for name in list_records(run, f"{QUARANTINE}/{folder}"):
            match = _DAMAGED.fullmatch(name)
            id = id_from_record(folder, match["id"]) if match else None
            if id is not None:
                found.append((f"{QUARANTINE}/{folder}/{name}", id))
    return found


def _has_no_use(view: RunView, place: str, id: CheckpointId) -> bool:
    """Whether the checkpoint is good without these bytes, and was seen whole since they were put aside: it may be
    rotated away before their time is over."""
    standing = view.history.standings(id.series).get(id)
    if standing is None or standing.outcome is not Outcome.GOOD or read_set_aside(view.run, id) is not None:
        return False
    if seen_for(view.run, place) is not None:
        return True
    wanted = Wanted(before_step=None if id.step is None else id.step + 1, series=id.series)
    return any(candidate.id == id for candidate in itertools.islice(known_good_candidates(view, wanted), 2))


def _beside(run: Run) -> list[Entry]:
    try:
        return run.storage.list("")
    except ObjectMissingError:
        return []


def _marks_of_others(run: Run) -> set[str]:
    """What other machines marked, or this one before its last start: by this one's clock its age is not known."""
    boot_id = this_host()[1]
    pins = {p.key for p in list_pins(run) if p.until is not None and p.owner.boot_id != boot_id}
    return pins | {mark.folder for mark in read_trash(run) if mark.boot_id != boot_id}
