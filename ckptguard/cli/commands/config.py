"""``ckptguard config``: which settings are in force, where each comes from, and which plugins are installed."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import say_text, table
from ckptguard.terminal.output import emit
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptguard.runs.settings_file import EffectiveSetting
    from ckptguard.values.settings import ReplicaPlace, Settings

CODES = (ExitCode.NOT_FOUND,)


@command("config", "Show the settings and plugins.", CODES, common="json config records no_plugins")
@click.argument("run", type=PathOrUrl(), required=False)
def config(run: str | None, shared: Shared) -> None:
    """Show the settings that are in force here, and where each comes from.

    A flag wins over the environment, the environment over the settings file, and the file over the default. With RUN
    you also see where its records and replicas are, and what its records add. Secrets are hidden. The plugins of other
    packages are listed without running them.
    """
    from ckptguard.plugins.listing import listed_plugins
    from ckptguard.runs.settings_file import effective_settings

    targets = [] if run is None else [run]
    settings = shared.settings(targets)
    found = list(effective_settings(settings, shared.config, os.environ, targets, records=shared.records))
    url = None
    if run is not None:
        url, found = _of_run(run, settings, found)
    if shared.as_json:
        emit("config", target=url, settings=found, plugins=listed_plugins(settings))
        return
    found.sort(key=lambda setting: setting.source == "default")
    table(("setting", "value", "from"), [(s.name, _text(s.value), s.place or s.source) for s in found])
    if plugins := listed_plugins(settings):
        rows = [(p.kind, p.name, p.version, p.package, str(p.interface), p.used or p.why_not) for p in plugins]
        say_text("")
        table(("plugins", "name", "version", "package", "interface", "used"), rows)


def _of_run(run: str, settings: Settings, found: Iterable[EffectiveSetting]) -> tuple[str, list[EffectiveSetting]]:
    """The run's URL, and the settings as they are for it."""
    from msgspec.structs import replace

    from ckptguard.records.run import open_run
    from ckptguard.records.run_settings import allowed_nonfinite
    from ckptguard.replicas.replicate import replica_places
    from ckptguard.storage.redaction import redacted

    opened = open_run(run, settings)
    own = {
        "records": redacted(opened.records.url),
        "replicas": [_place(redacted(url), place) for url, place in replica_places(opened.url, settings).items()],
    }
    added = [pattern for pattern in allowed_nonfinite(opened) if pattern not in settings.allow_nonfinite]
    shown = [replace(s, value=own[s.name]) if s.name in own else s for s in found]
    if added:
        both = [*settings.allow_nonfinite, *added]
        shown = [
            replace(s, value=both, source="records", place=None) if s.name == "allow_nonfinite" else s for s in shown
        ]
    return opened.url, shown


def _place(url: str, place: ReplicaPlace) -> object:
    """A place of replicas as the settings file has it: with its rule, if it has one."""
    from msgspec import to_builtins
    from msgspec.structs import replace

    rule = to_builtins(replace(place, url=url))
    return rule if len(rule) > 1 else url


def _text(value: object) -> str | None:
    """A value as the settings file has it."""
    if value is None or value == [] or value == {}:
        return None
    return json.dumps(value, ensure_ascii=False)
