"""The installed plugins as people ask for them: which are used here, and why not. None of their code is run."""

from __future__ import annotations

import msgspec

from ckptguard.plugins.installed import installed
from ckptguard.values.settings import Settings


class ListedPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """An installed plugin. `used` says when it is used, or `why_not`; the other is ""."""

    kind: str
    name: str
    version: str
    package: str
    interface: int | None
    used: str = ""
    why_not: str = ""


def listed_plugins(settings: Settings) -> list[ListedPlugin]:
    """Return every installed plugin under these settings."""
    found = []
    for plugin in installed():
        uses = {
            "formats": f"for local files that end in .{plugin.name}",
            "channels": f"for addresses plugin+{plugin.name}:// in notify",
            "checks": "for each verdict" if plugin.name in settings.checks else "",
            "layouts": "to find checkpoints" if plugin.name in settings.layouts else "",
        }
        used = "" if plugin.refused or settings.no_plugins else uses[plugin.kind]
        named = "plugins are turned off" if settings.no_plugins else f"the setting `{plugin.kind}` does not name it"
        fields = {name: getattr(plugin, name) for name in ("kind", "name", "version", "package", "interface")}
        found.append(ListedPlugin(**fields, used=used, why_not="" if used else plugin.refused or named))
    return found
