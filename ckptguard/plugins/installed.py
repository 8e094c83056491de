"""Which plugins are installed, by the metadata of packages alone: none of their code is run here."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from ckptguard.formats.strict_json import printable
from ckptguard.plugins.interface import INTERFACE, KINDS

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

_GROUPS = {f"ckptguard.{kind}": kind for kind in KINDS}


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


def trusted_paths() -> list[str]:
    """Return where packages of plugins and their modules are looked for. That is neither the working directory, which
    may hold what somebody else wrote, nor the folder of the script that was started."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None
    untrusted = set[str]()
    with contextlib.suppress(OSError):  # it was deleted
        untrusted.add(os.path.realpath(os.getcwd()))
    if script:
        untrusted.add(os.path.dirname(os.path.realpath(script)))
    untrusted.discard(os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..")))  # it gave us ckptguard
    return [path for path in sys.path if path and os.path.realpath(path) not in untrusted]


@functools.cache
def installed() -> tuple[Plugin, ...]:
    """Return every plugin, as it was when this process first asked. Of two with one name, both are refused."""
    from importlib.metadata import distributions  # takes longer than verifying a small file

    found: dict[str, list[Plugin]] = {}
    for package in distributions(path=trusted_paths()):
        with contextlib.suppress(Exception):  # half installed or damaged, which must not be our trouble
            if points := [point for point in package.entry_points if point.group in _GROUPS]:
                name = re.sub(r"[-_.]+", "-", package.name).lower()
                found.setdefault(name, [_plugin(point, package) for point in points])  # the first is what is imported
    plugins = [plugin for own in found.values() for plugin in own]
    often = Counter((plugin.kind, plugin.name.lower()) for plugin in plugins)
    refused = "two installed packages have a plugin of this kind and name"
    return tuple(
        msgspec.structs.replace(one, refused=refused) if often[one.kind, one.name.lower()] > 1 else one
        for one in sorted(plugins, key=lambda plugin: (plugin.kind, plugin.name, plugin.package))
    )


def find_plugin(kind: str, name: str) -> Plugin | None:
    """Return the plugin of this kind and name, also a refused one; or None."""
    return next((plugin for plugin in installed() if (plugin.kind, plugin.name) == (kind, name)), None)


def format_plugin(path: str) -> Plugin | None:
    """Return the format whose name is the end of this path, the longest first; or None."""
    name = path.rpartition("/")[2].lower()
    fits = [p for p in installed() if p.kind == "formats" and name.endswith("." + p.name.lower())]
    return max(fits, key=lambda plugin: len(plugin.name), default=None)


def _plugin(point: EntryPoint, package: Distribution) -> Plugin:
    name, mark, number = point.name.rpartition(".v")
    stated = int(number) if mark and name and number.isdecimal() and len(number) < 10 else None
    refused = ""
    if stated is None:
        refused = f"its entry point {point.name!r} does not end in the version of the interface, such as .v{INTERFACE}"
    elif stated != INTERFACE:
        refused = f"it is for version {stated} of the interface of plugins, and this ckptguard has version {INTERFACE}"
    kind, called = _GROUPS[point.group], name if stated is not None else point.name
    by, version = printable(package.name), printable(package.version)
    return Plugin(kind, printable(called), by, version, stated, point.value, refused)
