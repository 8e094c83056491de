"""Make the pictures of the documents again: a terminal as SVG, and the page of an incident as PNG.

    python tests/docs/pictures.py

Both show real output: of commands on a terminal of their own, and of a training that overflowed. The PNG needs
chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import sandbox
from rich.console import Console
from rich.text import Text
from support.markdown import DOCS
from terminal import HOME, on_a_terminal

COLUMNS = 84
STORY = (
    "ckptguard verify runs/exp1",
    "ckptguard known-good runs/exp1",
    "ckptguard rollback runs/exp1",
    "ckptguard list runs/exp1",
)


def draw_session(folder: Path) -> None:
    """A run whose newest save is full of NaN: found, and gone back from."""
    console = Console(record=True, width=COLUMNS, file=Path(os.devnull).open("w"), force_terminal=True)  # noqa: SIM115
    for command in STORY:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(on_a_terminal(command, folder, COLUMNS).rstrip("\n")))
    svg = console.export_svg(title="ckptguard")
    # The fonts would come from another machine: the reader's own will do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace(
        "Fira Code", "ui-monospace, Menlo, Consolas"
    )
    (DOCS / "assets/session.svg").write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE), encoding="utf-8")


def photograph_incident(folder: Path) -> None:
    """The page of the incident of a training that overflowed in fp16."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("the picture of the incident needs chromium: apt-get install chromium")
    subprocess.run(
        [sys.executable, "-m", "ckptguard", "incident", "runs/nan", "--html", "page.html"], cwd=folder, check=True
    )
    page = (folder / "page.html").read_text(encoding="utf-8").replace(str(folder), HOME)
    (folder / "page.html").write_text(page, encoding="utf-8")
    target = DOCS / "assets/incident.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=900,1150"]
    subprocess.run([chromium, *options, f"--screenshot={target}", f"file://{folder}/page.html"], check=True)


def main() -> None:
    """Make both."""
    with tempfile.TemporaryDirectory(prefix="ckptguard-docs-") as temporary:
        folder = Path(temporary).resolve()
        sandbox.fill(folder)
        draw_session(folder)
        sandbox.train_into_nan(folder / "runs/nan")
        photograph_incident(folder)


if __name__ == "__main__":
    main()
