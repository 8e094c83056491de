"""The catalogue of a real daemon: it follows the run, and may be deleted under the daemon's feet."""

from __future__ import annotations

from pathlib import Path

from support.daemon_process import Starter, save, until

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.values.ids import run_id_of


def test_it_follows_the_run(run: Path, start: Starter, short_folder: Path) -> None:
    """Verdicts, damage and incidents are in it as soon as a pass is done; it is the owner's alone. A daemon that starts
    again goes on with what it held."""
    folder = private_runtime_folder({"XDG_RUNTIME_DIR": str(short_folder)})
    id = run_id_of(str(run))
    path = Path(folder) / f"{id}.catalogue"

    def outcomes() -> dict[int | None, str]:
        noted = Catalogue(folder).noted(id)
        rows = noted.generations.values() if noted is not None else ()
        return {row.id.number: row.outcome for row in rows if row.in_place}

    save(run, 100)
    daemon = start(run)
    daemon.known_good(100)
    until(lambda: outcomes() == {100: "good"}, "a verdict in the catalogue")
    assert path.stat().st_mode & 0o077 == 0
    save(run, 200, nan=True)
    until(lambda: outcomes() == {100: "good", 200: "bad"}, "a second verdict")
    noted = Catalogue(folder).noted(id)
    assert noted is not None
    told = {(one.event.kind, one.event.cause) for one in noted.events}
    assert {("verdict", "bad"), ("incident", "numeric")} <= told
    path.unlink()
    save(run, 300)
    until(lambda: outcomes().keys() == {100, 200, 300}, "the file again")
    summary = Catalogue(folder).summary(id)
    assert summary is not None
    assert (summary.known_good_step, summary.protected, summary.incidents) == (300, True, {"numeric": 1})
    assert daemon.stop() == 0
    before = Catalogue(folder).noted(id)
    daemon = start(run)
    daemon.known_good(300)
    page = daemon.ask("page")[1]
    assert before is not None
    assert [event["number"] for event in page["events"]] == [one.number for one in before.events]
