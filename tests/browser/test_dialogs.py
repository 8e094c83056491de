"""Every dialog of the page by the keyboard alone: opened, walked through, left, filled in, carried out and closed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ckptguard_daemon
import pytest
from support.browsing import Dashboard, Watched
from support.daemon_process import save, until
from support.faults import flip
from support.tiny_files import safetensors_head

pytestmark = pytest.mark.timeout(900)
PAGE = Path(ckptguard_daemon.__file__).parent / "page"
CODE = {path.name: path.read_text(encoding="utf-8") for path in PAGE.rglob("*") if path.suffix in (".js", ".html")}
TABLE = CODE["actions.js"].partition("const VERBS = {\n")[2].partition("\n};")[0]
WORDS = dict(re.findall(r"^  (\w+): \{\s*word: \"([^\"]+)\"", TABLE, re.MULTILINE))
# What has the focus: its words, whether it is in the dialog, and whether it looks as if.
FOCUS = """() => {
  const one = document.activeElement;
  const words = one.labels?.[0]?.innerText || (one === document.body ? "" : one.innerText);
  return [(words ?? "").trim().replace(/\\s+/g, " "), one.closest("dialog") !== null, one.matches(":focus-visible")];
}"""
STOPS = "dialog :is(button, textarea, select, [tabindex='0']):not(:disabled)"


class Case(NamedTuple):
    """Where the button of an action is, on the page of a run or of a step, and what happens to the run before."""

    place: str | int
    before: Callable[[Path], object] = lambda run: None


def damaged(run: Path) -> None:
    """A bit flips, and that is seen."""
    flip(run / "net-3.safetensors")
    command = [sys.executable, "-m", "ckptguard", "verify", run / "net-3.safetensors"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 3


def zeros(run: Path) -> None:
    """A save that looks sick."""
    _save_like(run, 4, "model.w", bytes(4000))


def renamed(run: Path) -> None:
    """A save with another tensor."""
    _save_like(run, 5, "model.v", (run / "net-3.safetensors").read_bytes()[-4000:])


def _save_like(run: Path, step: int, name: str, numbers: bytes) -> None:
    whole = run / f".tmp-{step}"
    whole.write_bytes(safetensors_head({name: [len(numbers) // 4]}) + numbers)
    whole.rename(run / f"net-{step}.safetensors")


CASES = {
    "verify": Case(1),
    "pin": Case(1),
    "unpin": Case(1),
    "silence": Case(""),
    "unsilence": Case(""),
    "replicate": Case("keep"),
    "clear": Case(4, zeros),
    "accept": Case(5, renamed),
    "repair": Case(3, damaged),
    "rollback": Case("", lambda run: save(run, 6, nan=True)),
    "prune": Case("keep"),
}


def test_each_dialog_has_its_case() -> None:
    """There is one kind of dialog, and it is opened for the verbs of one table."""
    assert {name: text.count("<dialog") for name, text in CODE.items() if "<dialog" in text} == {"actions.js": 1}
    assert not [name for name, text in CODE.items() if re.search(r"\b(alert|confirm|prompt)\(", text)]
    assert WORDS.keys() == CASES.keys()
    assert len(WORDS) == len(re.findall(r"^  \w+: \{", TABLE, re.MULTILINE))


def test_who_has_no_mouse_can_do_everything(
    run: Path, tmp_path: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]
) -> None:
    """From Tab to Enter; the focus is always seen, stays in the dialog, and is back where it was after it."""
    settings = tmp_path / "settings.toml"
    settings.write_text(f'replicas = ["{tmp_path}/replica"]\n')
    for step in (1, 2, 3):
        save(run, step, age=100 - step)
    daemon = serve(run, arguments=("--config", str(settings)))
    page = look(daemon).log_in()
    daemon.known_good(3)

    def press_until(wanted: str) -> None:
        seen = []
        while not seen or not seen[-1].startswith(wanted):
            page.keyboard.press("Tab")
            words, _, visible = page.evaluate(FOCUS)
            assert visible or not words
            seen.append(words)
            assert len(seen) < 300, f"no key leads to {wanted!r}: {seen}"

    def address(place: str | int) -> str:
        if isinstance(place, str):
            return daemon.page_of(run, *filter(None, [place]))
        one = until(lambda: [one for one in daemon.ask("page")[1]["generations"] if one["step"] == place], f"{place}")
        return daemon.page_of(run, "checkpoint", one[-1]["name"])

    def opened(word: str) -> None:
        page.keyboard.press("Enter")
        page.get_by_text("Planned changes").wait_for()
        assert page.get_by_role("dialog").get_by_role("heading", level=2).inner_text().startswith(word)

    def walked() -> None:
        stops, seen = page.locator(STOPS).count(), set()
        for _ in range(2 * stops + 2):
            page.keyboard.press("Tab")
            words, inside, visible = page.evaluate(FOCUS)
            assert (inside and visible) or not words, words
            seen |= {words} if inside else set()
        assert len(seen) == stops

    for verb, case in CASES.items():
        case.before(run)
        page.goto(address(case.place))
        word, button = WORDS[verb], f"{WORDS[verb]}…"
        if verb == "prune":
            press_until("Keep the newest")
            page.keyboard.type("1")
            press_until("Show what it would remove")
            page.keyboard.press("Enter")
        page.get_by_role("button", name=button, exact=True).first.wait_for()
        press_until(button)
        opened(word)
        walked()
        page.keyboard.press("Escape")
        page.locator("dialog").wait_for(state="detached")
        assert page.evaluate(FOCUS)[0] == button
        opened(word)
        if verb == "silence":
            press_until("For how long")
            page.keyboard.press("ArrowDown")
            page.get_by_text("until 1d").wait_for()
        if verb != "verify":
            page.locator("dialog textarea:focus").wait_for()
            page.keyboard.type(f"why {verb}")
        press_until(f"{word} run")
        page.keyboard.press("Enter")
        page.get_by_text("Done. It is on record.").wait_for()
        page.locator("dialog button:focus").wait_for()
        page.keyboard.press("Enter")
        page.locator("dialog").wait_for(state="detached")
        assert page.evaluate("document.activeElement !== document.body")
    ended = [json.loads(path.read_text()) for path in (run / "_ckptguard/audit").glob("*.ended.json")]
    done = {one["verb"]: (one["state"], one["reason"]) for one in ended}
    assert done == {verb: ("done", "" if verb == "verify" else f"why {verb}") for verb in CASES}
