"""Commands as they are on a terminal: what they print there, with or without its colours."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

HOME = "/home/you"
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def on_a_terminal(command: str, folder: Path, columns: int = 80) -> str:
    """What bash prints for a command in a folder, colours included; the folder is called /home/you. The terminal is one
    on which no line can be drawn again, so there are no bars of progress."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("CKPTGUARD_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {"COLUMNS": str(columns), "LINES": "50", "TERM": "dumb", "PATH": path, "TZ": "UTC"}
    reader, terminal = pty.openpty()
    with subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=kept | ours, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        text = b""
        with contextlib.suppress(OSError):  # the other end was closed: that is how a terminal ends
            while chunk := os.read(reader, 65536):
                text += chunk
        process.wait(250)
    os.close(reader)
    shown = text.decode().replace("\r\n", "\n").replace(str(folder), HOME)
    assert "Traceback" not in shown, shown
    # What is left of a bar is an empty line.
    return re.sub(r"[ \t]+$", "", shown, flags=re.MULTILINE).lstrip("\n")


def without_colours(text: str) -> str:
    """The same as plain text."""
    return _COLOURS.sub("", text)
