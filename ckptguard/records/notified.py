"""What people were told of, by whom it reached: an event is not told again after a restart, nor lost by one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from ckptguard.decisions.known_good import CurrentVerdict, verdict_name
from ckptguard.records.run import Run, list_records, read_sound, write_once
from ckptguard.values.ids import series_folder
from ckptguard.values.record_formats import PLAIN

FOLDER = "told"
INCIDENTS = "000000000000"  # the channel of the run's own incidents: what needs none, or has it
_NAME = re.compile(r"(?P<channel>[0-9a-f]{12})/(?:(?P<event>[0-9a-f]{32})|before\.(?P<number>\d{4}))\.json")


def read_notified(run: Run) -> Mapping[str, set[str]]:
    """The keys of the events that each channel has had or need not have. A channel for which nobody noted with what it
    begins is absent."""
    notified: dict[str, set[str]] = {}
    begun = set()
    for name in list_records(run, FOLDER, recursive=True, with_content=True):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        events = notified.setdefault(match["channel"], set())
        if match["event"]:
            events.add(match["event"])
        else:
            begun.add(match["channel"])
            events.update(read_sound(run, f"{FOLDER}/{name}", list[str], name) or ())
    return {channel: notified[channel] for channel in begun}


def mark_notified(run: Run, channel: str, event: str) -> None:
    """Note that an event reached a channel."""
    write_once(run, f"{FOLDER}/{channel}/{event}.json", {"format": PLAIN.writes})


def skip_notifications(run: Run, channel: str, events: Iterable[str]) -> None:
    """Note events that a channel need not have: they are from before it was named, or too many."""
    known, number = sorted(events), 1
    while not write_once(run, f"{FOLDER}/{channel}/before.{number:04d}.json", known):
        number += 1


def verdict_key(current_verdict: CurrentVerdict) -> str:
    """The key of the event that this verdict was given."""
    return event_key("verdict", series_folder(current_verdict.id.series), verdict_name(current_verdict))


def event_key(*parts: str) -> str:
    """The same for the same event, whichever process tells it."""
    return hashlib.blake2b("\0".join(parts).encode(errors="surrogateescape"), digest_size=16).hexdigest()
