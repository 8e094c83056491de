"""Which plugins are installed, by the metadata of packages alone: none of their code is run here."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import msgspec

from ckptguard.plugins.interface import INTERFACE, KINDS


class Plugin(msgspec.Struct, frozen=True):
    """An installed plugin: its kind and name, its package, and the version of the interface that it was written for.

    `refused` says why it is not used; "" if it is. The `entry` is where its function is: ``module:name``.
    """

    kind: str
    name: str
    package: str
    version: str
    interface: int | None
    entry: str
    refused: str = ""

    @property
    def label(self) -> str:
        """How verdicts name it."""
        return f"{self.kind}/{self.name} {self.version}"


@functools.cache
def installed() -> tuple[Plugin, ...]:
    """Return every plugin, as it was when this process first asked. Of two with one name, both are refused."""
    from importlib.metadata import entry_points  # takes longer than verifying a small file

    found = [_plugin(kind, point) for kind in KINDS for point in entry_points(group=f"ckptguard.{kind}")]
    often = Counter((plugin.kind, plugin.name) for plugin in found)
    refused = "two installed packages have a plugin of this kind and name"
    return tuple(
        msgspec.structs.replace(one, refused=refused) if often[one.kind, one.name] > 1 else one
        for one in sorted(found, key=lambda plugin: (plugin.kind, plugin.name, plugin.package))
    )


def find_plugin(kind: str, name: str) -> Plugin | None:
    """Return the plugin of this kind and name, also a refused one; or None."""
    return next((plugin for plugin in installed() if (plugin.kind, plugin.name) == (kind, name)), None)


def format_plugin(path: str) -> Plugin | None:
    """Return the format whose name is the end of this path, the longest first; or None."""
    name = path.rpartition("/")[2].lower()
    fits = [p for p in installed() if p.kind == "formats" and name.endswith("." + p.name.lower())]
    return max(fits, key=lambda plugin: len(plugin.name), default=None)


def _plugin(kind: str, point: Any) -> Plugin:
    name, mark, number = point.name.rpartition(".v")
    stated = int(number) if mark and name and number.isdecimal() and len(number) < 10 else None
    refused = ""
    if stated is None:
        refused = f"its entry point {point.name!r} does not end in the version of the interface, such as .v{INTERFACE}"
    elif stated != INTERFACE:
        refused = f"it is for version {stated} of the interface of plugins, and this ckptguard has version {INTERFACE}"
    package, version = (point.dist.name, point.dist.version) if point.dist is not None else ("", "")
    return Plugin(kind, name if stated is not None else point.name, package, version, stated, point.value, refused)
