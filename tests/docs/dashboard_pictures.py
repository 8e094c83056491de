"""Photograph every page of the dashboard, in each width and theme; and make the pictures of the documents again.

    python tests/docs/dashboard_pictures.py            those of docs/assets
    python tests/docs/dashboard_pictures.py FOLDER     all of them, into a folder, to look at

It needs chromium, and playwright and pillow from pip.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import sandbox
from support.browsing import Dashboard, Watched, chromium
from support.daemon_process import save, until
from support.markdown import DOCS
from terminal import HOME

WIDTHS, SCHEMES = (400, 1280, 1920), ("light", "dark")
CHOSEN = ("fleet-1280-light", "run-1280-light", "heat-1280-dark", "incident-1280-light", "run-400-dark")
RENAME = """([home, shown]) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(home, shown);
}"""
TALLEST = 1400  # pixels of a picture in the documents


def world(folder: Path) -> dict[str, Path]:
    """Runs of each kind: one whose training went into NaN, one of a Trainer, a long one, shards, and one not begun."""
    sandbox.in_a_process("fill", folder)
    runs = {name: folder / "runs" / name for name in ("vlm-small", "exp1", "pretrain-3b", "llama", "tomorrow")}
    sandbox.in_a_process("train_into_nan", runs["vlm-small"])
    (folder / "models/llama").rename(runs["llama"])
    runs["pretrain-3b"].mkdir()
    for number in range(1, 61):
        save(runs["pretrain-3b"], number * 500, nan=number in (41, 42), age=3600 * (62 - number), numbers=20_000)
    return runs


def pages(daemon: Dashboard, runs: dict[str, Path]) -> Iterator[tuple[str, str, str, Callable | None]]:
    """(name, address, what is there when it is ready, what is done then) of each page."""

    def name(run: str, index: int) -> str:
        generations = until(lambda: daemon.ask("page", run=runs[run])[1]["generations"], "its checkpoints")
        return generations[index]["name"]

    def at(run: str, *parts: str) -> str:
        return daemon.page_of(runs[run], *parts)

    def preview(page) -> None:
        page.get_by_label("Keep the newest").fill("5")
        page.get_by_role("button", name="Show what it would remove").click()
        page.get_by_role("heading", name="Would be removed").wait_for()

    def dialog(page) -> None:
        page.get_by_role("button", name="Pin…").click()
        page.get_by_label("Reason, for the record").wait_for()

    incident = daemon.ask("page", run=runs["vlm-small"])[1]["incidents"][0]["name"]
    yield "fleet", f"{daemon.origin}/#/", "tbody tr:nth-child(5)", None
    yield "run", at("vlm-small"), "[role=img][aria-label^='Loss:']", None
    yield "run-long", at("pretrain-3b"), ".events li", None
    yield "checkpoint", at("vlm-small", "checkpoint", name("vlm-small", -1)), "#tensors", None
    yield "checkpoint-bad", at("exp1", "checkpoint", name("exp1", -1)), ".findings li", None
    yield "dialog", at("vlm-small", "checkpoint", name("vlm-small", -1)), "#tensors", dialog
    yield "heat", at("exp1", "heat"), "main canvas", None
    yield "heat-long", at("pretrain-3b", "heat"), "main canvas", None
    yield "diff", at("exp1", "diff", name("exp1", -2), name("exp1", -1)), "main table", None
    yield "diff-choose", at("exp1", "diff"), "main select", None
    yield "shards", at("llama", "shards", name("llama", -1)), "main table", None
    yield "incident", at("vlm-small", "incident", incident), "#causes", None
    yield "keep", at("pretrain-3b", "keep"), "#retention", preview


def photograph(folder: Path, chosen: tuple[str, ...] | None) -> None:
    """Write the pictures into a folder: all, or the chosen ones."""
    with tempfile.TemporaryDirectory(prefix="ckptguard-", dir="/tmp") as temporary:
        home = Path(temporary).resolve()
        runs = world(home)
        daemon = Dashboard(home, *runs.values())
        try:
            until(lambda: len(daemon.ask("checkpoints", run=runs["pretrain-3b"])[1]["checkpoints"]) == 60, "60 saves")
            until(lambda: daemon.ask("page", run=runs["vlm-small"])[1]["incidents"], "the incident")
            daemon.outcome(10)
            with chromium() as browser:
                watched = Watched(browser, daemon)
                page = watched.log_in()
                for name, address, there, act in pages(daemon, runs):
                    for scheme in SCHEMES:
                        for width in WIDTHS:
                            called = f"{name}-{width}-{scheme}"
                            if chosen is not None and called not in chosen:
                                continue
                            page.emulate_media(color_scheme=scheme)
                            page.set_viewport_size({"width": width, "height": 900})
                            page.goto("about:blank")
                            page.goto(address)
                            page.locator(there).first.wait_for()
                            page.wait_for_timeout(600)  # charts follow the size of their window
                            if act is not None:
                                act(page)
                            whole = page.evaluate("document.documentElement.scrollHeight")
                            height = min(whole, TALLEST if chosen else 6000) if name != "dialog" else 900
                            page.set_viewport_size({"width": width, "height": height})
                            page.wait_for_timeout(300)
                            page.evaluate(RENAME, [str(home), HOME])
                            page.screenshot(path=folder / f"{called}.png")
                assert watched.wrong == [], watched.wrong
        finally:
            daemon.stop()


def shrink(path: Path) -> None:
    """Keep 256 colours, which is a quarter of the size."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main() -> None:
    """Make them."""
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        folder.mkdir(parents=True, exist_ok=True)
        photograph(folder, None)
        return
    with tempfile.TemporaryDirectory(prefix="ckptguard-pictures-") as temporary:
        photograph(Path(temporary), CHOSEN)
        for picture in Path(temporary).glob("*.png"):
            shrink(picture)
            (DOCS / "assets" / f"dashboard-{picture.name}").write_bytes(picture.read_bytes())


if __name__ == "__main__":
    main()
