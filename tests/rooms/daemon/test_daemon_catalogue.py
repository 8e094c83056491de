"""The catalogue of a real daemon: it follows the run, and may be deleted under the daemon's feet."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from support.daemon_process import Starter, save, until

from ckptguard.catalogue.questions import Timeline, events_after, summaries, timeline
from ckptguard.catalogue.schema import open_for_reading
from ckptguard.storage.runtime_folder import private_runtime_folder


def catalogues(folder: str) -> set[Path]:
    """The catalogues in a folder."""
    return set(Path(folder).glob("*.catalogue"))


def ask(path: Path, question: Any, **named: Any) -> Any:
    """The answer, or None while there is none."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(open_for_reading(str(path))) as db:
        return question(db, **named)
    return None


def outcomes(path: Path) -> dict[int | None, str]:
    """What the catalogue says of the one run in it, by step."""
    found: dict[int | None, str] = {}
    for id in ask(path, summaries) or ():
        line = ask(path, timeline, id=id)
        found = {g.id.number: g.outcome for g in line.generations if g.in_place} if isinstance(line, Timeline) else {}
    return found


def test_it_follows_the_run(run: Path, start: Starter, short_folder: Path) -> None:
    """Verdicts, damage and incidents are in it as soon as a pass is done; it is the owner's alone."""
    folder = private_runtime_folder({"XDG_RUNTIME_DIR": str(short_folder)})
    save(run, 100)
    daemon = start(run)
    daemon.known_good(100)
    [path] = until(lambda: catalogues(folder), "a catalogue")
    until(lambda: outcomes(path) == {100: "good"}, "a verdict in the catalogue")
    assert path.stat().st_mode & 0o077 == 0
    first = ask(path, events_after, number=0).last
    save(run, 200, nan=True)
    until(lambda: outcomes(path) == {100: "good", 200: "bad"}, "a second verdict")
    news = [event.event for event in ask(path, events_after, number=first).events]
    assert {(event.kind, event.cause) for event in news} == {("verdict", "bad"), ("incident", "numeric")}
    path.with_name(f"{path.name}-wal").unlink()
    path.unlink()
    save(run, 300)
    until(lambda: outcomes(path).keys() == {100, 200, 300}, "a new catalogue")
    assert ask(path, events_after, number=first).reset
    [one] = ask(path, summaries).values()
    assert (one.known_good_step, one.protected, one.incidents) == (300, True, {"numeric": 1})
