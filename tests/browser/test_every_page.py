"""Every page, for everybody: no violation of accessibility in either theme, on a desk and on a phone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.browsing import Dashboard, Watched, violations
from support.daemon_process import save, until

from docs import sandbox

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def test_no_page_keeps_anybody_out(
    tmp_path: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]
) -> None:
    """axe finds nothing wrong on any page in either theme, and no page is wider than its window."""
    run, other = tmp_path / "run", tmp_path / "other"
    sandbox.in_a_process("train_into_nan", run)
    other.mkdir()
    save(other, 5)
    save(other, 10, nan=True)
    daemon = serve(run, other)
    watched = look(daemon, reduced_motion="reduce")  # no colour is between two
    page = watched.context.new_page()
    wrong: dict[str, object] = {}

    def see(name: str) -> None:
        for width, scheme in ((1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            found = violations(page)
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                found.append("wider than its window")
            if found:
                wrong[f"{name}, {width}, {scheme}"] = found

    watched.may_be_away = True  # nobody is logged in: the browser tells of each refusal
    page.goto(daemon.origin)
    page.get_by_role("heading", name="Sign in").wait_for()
    see("sign in")
    page.goto(daemon.link)
    page.get_by_role("link", name="other", exact=True).wait_for()
    watched.may_be_away = False
    see("fleet")
    page.goto(daemon.page_of(run))
    page.locator("[role=img][aria-label^='Loss:']").wait_for()
    page.locator(".events .outcome.good").first.wait_for()
    see("run")
    page.get_by_label("Save the checkpoints", exact=True).click()
    page.get_by_role("button", name="Save the checkpoints as CSV").wait_for()
    see("menu")
    names = [one["name"] for one in daemon.ask("page", run=run)[1]["generations"]]
    for path, there in PAGES.items():
        page.goto(daemon.page_of(run, *path.format(first=names[0], last=names[-1]).split(" ")))
        page.locator(there).first.wait_for()
        see(path)
    until(lambda: daemon.ask("checkpoints", run=other)[1]["checkpoints"][-1]["outcome"] == "bad", "a verdict")
    page.goto(daemon.page_of(other, "checkpoint", daemon.ask("page", run=other)[1]["generations"][-1]["name"]))
    page.locator(".findings li").first.wait_for()
    see("bad checkpoint")
    page.get_by_role("button", name="Pin").click()
    page.get_by_label("Reason, for the record").wait_for()
    see("dialog")
    page.keyboard.press("Escape")
    page.goto(daemon.page_of(run, "keep"))
    page.get_by_role("button", name="Show what it would remove").click()
    page.get_by_text(re.compile("would go to the trash")).wait_for()
    see("keep")
    page.goto(daemon.page_of(run))
    page.locator(".incidents a").first.click()
    page.get_by_role("heading", name="Likely cause, and what to do").wait_for()
    see("incident")
    page.goto(daemon.page_of(run).partition("#")[0] + "#/nothing/here")
    page.get_by_role("heading", name="There is nothing at this address").wait_for()
    see("nowhere")
    assert wrong == {}


PAGES = {
    "checkpoint {last}": "#tensors",
    "heat": "main canvas",
    "diff": "main h1",
    "diff {first} {last}": "main h2",
    "shards {last}": "main table",
}
