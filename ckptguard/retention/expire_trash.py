"""Collect what was put aside: damaged bytes that are of no use any more, and what came back from the trash too late."""

from __future__ import annotations

import re

from ckptguard.errors import ObjectMissingError
from ckptguard.records.daemon_record import this_host
from ckptguard.records.first_seen import forget_sightings, seen_for
from ckptguard.records.kept import read_set_aside
from ckptguard.records.pins import list_pins
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run, list_records
from ckptguard.records.trash import read_trash
from ckptguard.runs.find_known_good import known_good_candidates
from ckptguard.runs.history import History, Key, load_history
from ckptguard.storage import Entry
from ckptguard.values.ids import parse_id, series_from_folder
from ckptguard.values.verdict import Outcome

_DAMAGED = re.compile(r"(?P<id>.+)\.damaged-[0-9a-f]{8}")
_REPLACED = re.compile(r"tmp-replaced-[0-9a-f]{8}")


def collect_aside(run: Run, grace: float) -> list[str]:
    """Remove, after `grace` seconds, damaged bytes whose checkpoint was good again all that time, and what was put back
    from the trash when its place was taken again; returns their keys. While a checkpoint is not good its damaged bytes
    stay.

    The time is measured by this machine's own clock from when it was first seen so, by a call of this; what it has seen
    of other machines' marks and pins is noted too. The caller holds the run's lock.
    """
    history = load_history(run)
    damaged = {key for key, series, id in _damaged(run) if _has_no_use(run, history, key, series, id)}
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


def _damaged(run: Run) -> list[tuple[str, str, Key]]:
    """(key, series, (step, generation)) of every folder of damaged bytes."""
    found = []
    for folder in list_records(run, QUARANTINE):
        for name in list_records(run, f"{QUARANTINE}/{folder}"):
            match = _DAMAGED.fullmatch(name)
            key = parse_id(match["id"]) if match else None
            if key is not None:
                found.append((f"{QUARANTINE}/{folder}/{name}", series_from_folder(folder), key))
    return found


def _has_no_use(run: Run, history: History, place: str, series: str, key: Key) -> bool:
    """Whether the checkpoint is good without these bytes, and was seen whole since they were put aside: it may be
    rotated away before their time is over."""
    standing = history.standings(series).get(key)
    if standing is None or standing.outcome is not Outcome.GOOD or read_set_aside(run, series, *key) is not None:
        return False
    if seen_for(run, place) is not None:
        return True
    before = None if key[0] is None else key[0] + 1
    return any(c.key == key for c in known_good_candidates(run, history, series=series, before_step=before, most=2))


def _beside(run: Run) -> list[Entry]:
    try:
        return run.storage.list("")
    except ObjectMissingError:
        return []


def _marks_of_others(run: Run) -> set[str]:
    """What other machines marked, or this one before its last start: by this one's clock its age is not known."""
    boot_id = this_host()[1]
    pins = {p.key for p in list_pins(run) if p.until is not None and p.owner is not None and p.owner.boot_id != boot_id}
    return pins | {mark.folder for mark in read_trash(run) if mark.boot_id != boot_id}
