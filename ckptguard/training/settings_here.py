"""The settings that hold where training runs."""

from __future__ import annotations

import os
from pathlib import Path

from ckptguard.config import Settings, parse_settings, with_environment


def settings_here() -> Settings:
    """``./ckptguard.toml`` and the environment: the same that a daemon started here reads. SettingsError if they are
    nonsense."""
    file = Path("ckptguard.toml")
    settings = parse_settings(file.read_text(encoding="utf-8"), str(file)) if file.is_file() else Settings()
    return with_environment(settings, os.environ)
