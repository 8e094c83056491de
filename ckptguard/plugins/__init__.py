"""Layouts, formats, checks and channels that other packages install. `docs/guides/plugins.md` says how to write one.

Everything that an author needs is exported here. No plugin is imported by our own processes: each call runs in a
process of its own, with a limit of time and memory, and its answer is checked.
"""

from __future__ import annotations

from ckptguard.plugins.interface import (
    INTERFACE,
    ChannelPlugin,
    CheckPlugin,
    FileContents,
    FormatPlugin,
    FoundCheckpoint,
    LayoutPlugin,
    Remark,
    Saved,
    SavedTensor,
    StoredTensor,
)

__all__ = [
    "INTERFACE",
    "ChannelPlugin",
    "CheckPlugin",
    "FileContents",
    "FormatPlugin",
    "FoundCheckpoint",
    "LayoutPlugin",
    "Remark",
    "Saved",
    "SavedTensor",
    "StoredTensor",
]
