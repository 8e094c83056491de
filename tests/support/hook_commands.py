"""Commands for a daemon's hooks that keep what they are told, and the settings that name them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TELL = "import sys; open({path!r}, 'a').write(sys.stdin.read())"


def command(path: Path) -> tuple[str, ...]:
    """A command that appends what it is told to a file."""
    return (sys.executable, "-c", TELL.format(path=str(path)))


def told(path: Path) -> list[dict[str, Any]]:
    """What such a command was told."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def toml(folder: Path, **settings: object) -> tuple[str, str]:
    """A settings file as arguments."""
    path = folder / "settings.toml"
    path.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items()))
    return ("--config", str(path))
