"""What is saved from a page says what the page says."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.browsing import Dashboard, Watched
from support.daemon_process import save, until

if TYPE_CHECKING:
    from playwright.sync_api import Page


def _saved(page: Page, what: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a table, as its JSON has them. Its CSV has as many."""
    paths = []
    for kind in ("JSON", "CSV"):
        page.get_by_label(f"Save {what}", exact=True).click()
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save {what} as {kind}").click()
        paths.append(folder / download.value.suggested_filename)
        download.value.save_as(paths[-1])
    rows: list[dict[str, Any]] = json.loads(paths[0].read_text())
    with paths[1].open(encoding="utf-8", newline="") as file:
        assert [list(row) for row in csv.DictReader(file)] == [list(row) for row in rows]
    return rows


def test_saved_tables_name_their_rows_and_say_the_outcomes(
    run: Path, tmp_path: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]
) -> None:
    """A saved fleet and a saved list of checkpoints have names, outcomes in words, and times that people read."""
    save(run, 5)
    save(run, 10, nan=True)
    daemon = serve(run)
    page = look(daemon).log_in()
    until(
        lambda: [one["outcome"] for one in daemon.ask("checkpoints")[1]["checkpoints"]] == ["good", "bad"], "verdicts"
    )
    until(lambda: len(daemon.ask("page")[1]["generations"]) == 2, "the catalogue")
    page.goto(daemon.page_of(run))
    page.get_by_role("button", name="bad", exact=True).wait_for()
    rows = _saved(page, "the checkpoints", tmp_path)
    assert {(row["path"], row["step"], row["outcome"]) for row in rows} == {
        ("net-5.safetensors", 5, "good"),
        ("net-10.safetensors", 10, "bad"),
    }
    assert all(row["saved_at"].endswith("Z") for row in rows)
    page.goto(f"{daemon.origin}/#/")
    page.get_by_text("Newest is bad").wait_for()
    [row] = _saved(page, "the fleet", tmp_path)
    assert (row["name"], row["protected"], row["newest_outcome"]) == (run.name, True, "bad")
    assert row["explanation"].startswith("yes: net-5.safetensors")
