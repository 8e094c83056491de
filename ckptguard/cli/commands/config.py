"""``ckptguard config``: which settings are in force, and where each comes from."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import table
from ckptguard.terminal.output import emit
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptguard.runs.settings_file import EffectiveSetting
    from ckptguard.values.settings import Settings

CODES = (ExitCode.NOT_FOUND,)


@command("config", "Show the settings, and where each comes from.", CODES)
@click.argument("run", type=PathOrUrl(), required=False)
def config(run: str | None, shared: Shared) -> None:
    """Show the settings that are in force here, and where each comes from.

    A flag wins over the environment, the environment over the settings file, and the file over the default. With RUN
    you also see where its records and replicas are, and what its records add. Secrets are hidden.
    """
    from ckptguard.runs.settings_file import effective_settings

    targets = [] if run is None else [run]
    settings = shared.settings(targets)
    found = list(effective_settings(settings, shared.config, os.environ, targets, records=shared.records))
    url = None
    if run is not None:
        url, found = _of_run(run, settings, found)
    if shared.as_json:
        emit("config", target=url, settings=found)
        return
    found.sort(key=lambda setting: setting.source == "default")
    table(("setting", "value", "from"), [(s.name, _text(s.value), s.place or s.source) for s in found])


def _of_run(run: str, settings: Settings, found: Iterable[EffectiveSetting]) -> tuple[str, list[EffectiveSetting]]:
    """The run's URL, and the settings as they are for it."""
    from msgspec.structs import replace

    from ckptguard.records.run import open_run
    from ckptguard.records.run_settings import allowed_nonfinite
    from ckptguard.replicas.replicate import replica_urls
    from ckptguard.storage.redaction import redacted

    opened = open_run(run, settings)
    own = {
        "records": redacted(opened.records.url),
        "replicas": [redacted(u) for u in replica_urls(opened.url, settings)],
    }
    added = [pattern for pattern in allowed_nonfinite(opened) if pattern not in settings.allow_nonfinite]
    shown = [replace(s, value=own[s.name]) if s.name in own else s for s in found]
    if added:
        both = [*settings.allow_nonfinite, *added]
        shown = [
            replace(s, value=both, source="records", place=None) if s.name == "allow_nonfinite" else s for s in shown
        ]
    return opened.url, shown


def _text(value: object) -> str | None:
    """A value as the settings file has it."""
    if value is None or value == [] or value == {}:
        return None
    return json.dumps(value, ensure_ascii=False)
