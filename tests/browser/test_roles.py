"""Who may do what: a reader looks, an operator acts with a plan and a reason, and a link works once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from support.browsing import Dashboard, Watched
from support.daemon_process import save


def test_a_reader_can_only_look(run: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]) -> None:
    """No page offers an action to a reader, and the daemon refuses one that is sent all the same."""
    save(run, 1)
    daemon = serve(run, role="reader")
    watched = look(daemon)
    page = watched.log_in()
    daemon.known_good(1)
    name = daemon.ask("page")[1]["generations"][0]["name"]
    for parts, there in {(): "#checkpoints", ("checkpoint", name): "#tensors", ("keep",): "#retention"}.items():
        page.goto(daemon.page_of(run, *parts))
        page.locator(there).wait_for()
        page.get_by_text("reader", exact=True).wait_for()
        assert page.locator(".actions").count() == 0
    answer = page.request.post(
        f"{daemon.origin}{daemon.url('actions/pin')}",
        data={"checkpoint": name, "dry_run": False, "reason": "x", "token": "y"},
        headers={"origin": daemon.origin},
    )
    assert answer.status == 403
    assert not (run / "_ckptguard" / "audit").exists()


def test_an_operator_pins_with_a_plan_and_a_reason(
    run: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]
) -> None:
    """The dialog shows what would be done, asks the owner's own page for no reason, and leaves a record of who, what
    and why."""
    save(run, 1)
    daemon = serve(run)
    page = look(daemon).log_in()
    daemon.known_good(1)
    name = daemon.ask("page")[1]["generations"][0]["name"]
    page.goto(daemon.page_of(run, "checkpoint", name))
    page.get_by_role("button", name="Pin…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Planned changes").wait_for()
    dialog.get_by_text("net-1.safetensors").first.wait_for()
    go = dialog.get_by_role("button", name="Pin run")
    assert go.is_enabled()
    assert not list((run / "_ckptguard").glob("audit/*"))
    page.get_by_label("Reason, for the record").press_sequentially("the paper's figure 3")
    go.click()
    dialog.get_by_text("Done. It is on record.").wait_for()
    page.wait_for_selector("dialog button:focus")  # who has no mouse closes it at once
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Unpin…").wait_for()
    [record] = [json.loads(path.read_text()) for path in (run / "_ckptguard/audit").glob("*.ended.json")]
    assert (record["verb"], record["role"], record["state"]) == ("pin", "operator", "done")
    assert record["reason"] == "the paper's figure 3"


def test_an_operator_silences_a_run(run: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]) -> None:
    """For as long as they choose; every page of the run says so, until they end it."""
    save(run, 1)
    daemon = serve(run)
    page = look(daemon).log_in()
    daemon.known_good(1)
    page.goto(daemon.page_of(run))
    page.get_by_role("button", name="Silence…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("until 8h").wait_for()
    dialog.get_by_label("For how long").select_option("1d")
    dialog.get_by_text("until 1d").wait_for()
    page.get_by_label("Reason, for the record").press_sequentially("the disk is replaced")
    dialog.get_by_role("button", name="Silence run").click()
    dialog.get_by_text("Done. It is on record.").wait_for()
    dialog.get_by_role("button", name="Close").click()
    page.locator(".sentence", has_text="no messages and no alerts").get_by_text("the disk is replaced").wait_for()
    [record] = [json.loads(path.read_text()) for path in (run / "_ckptguard/silences").glob("*.json")]
    assert record["reason"] == "the disk is replaced"
    assert 86000 < record["until"] - time.time() <= 86400
    page.get_by_role("link", name="Fleet").first.click()
    page.locator(".chip", has_text="silenced").wait_for()
    page.goto(daemon.page_of(run))
    page.get_by_role("button", name="Unsilence…").click()
    page.get_by_label("Reason, for the record").press_sequentially("the disk is in")
    dialog.get_by_role("button", name="Unsilence run").click()
    dialog.get_by_text("is not silenced any more").wait_for()
    dialog.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Silence…", exact=True).wait_for()
    assert list((run / "_ckptguard/silences").iterdir()) == []


def test_a_link_works_once(run: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]) -> None:
    """The second browser that opens the link is refused with a sentence, and its address keeps no secret."""
    daemon = serve(run)
    first, second = look(daemon), look(daemon)
    assert "#" not in first.log_in().url.replace("#/", "")
    second.may_be_away = True  # a refusal is on the console, too
    page = second.context.new_page()
    page.goto(daemon.link)
    page.locator("#said", has_text="was used").wait_for()
    assert daemon.link.partition("#")[2] not in page.url
