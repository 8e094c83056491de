"""What a daemon was asked to guard: runs by name, and a fleet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.fleet import FleetRules, folders_of, read_fleet
from ckptguard.runs.settings_file import load_settings
from ckptguard.storage import normalise_url
from ckptguard.values.access import Role
from ckptguard.values.settings import Settings
from ckptguard_daemon.log import log


class DaemonPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The named runs by their URLs, and the rules by which the runs of a fleet are found.

    `settings` are those of the named runs and of the daemon itself. A run that is named and found has the fleet's.
    """

    urls: tuple[str, ...]
    settings: Settings
    fleet: FleetRules | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """What distinguishes this plan from those of other daemons."""
        return self.urls if self.fleet is None else (*self.urls, *self.fleet.file.folders)


class ListenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the daemon listens and for whom, and where its metrics go: each as the command's option of its name."""

    socket_path: str | None = None
    http: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tokens: str | None = None
    http_url: str | None = None
    link: Role | None = None
    if_unguarded: bool = False
    metrics: str | None = None
    metrics_token: str | None = None
    metrics_file: str | None = None


class Reload(NamedTuple):
    """How a plan is read again, once that is `asked` for."""

    asked: threading.Event
    read: Callable[[], DaemonPlan]


def read_plan(runs: Sequence[str], fleet: str | None, config: str | None, environ: Mapping[str, str]) -> DaemonPlan:
    """Read the settings and the fleet file. Raises SettingsError or NotFoundError, in one sentence."""
    if not runs and fleet is None:
        raise SettingsError("name at least one RUN, or a fleet with --fleet")
    targets = (*runs, *(() if fleet is None else folders_of(fleet)))
    settings = load_settings(config, environ, targets, say=_say)
    urls = distinct_urls(runs, settings)
    rules = None if fleet is None else read_fleet(fleet, settings, environ=environ, say=_say)
    return DaemonPlan(urls=urls, settings=settings if rules is None else rules.settings, fleet=rules)


def _say(sentence: str) -> None:
    log("settings_ignored", level="warning", reason=sentence)


def distinct_urls(runs: Sequence[str], settings: Settings) -> tuple[str, ...]:
    """Return the normalised URLs of the runs, each once. Raises SettingsError if they would share a place for
    records."""
    urls = tuple(dict.fromkeys(normalise_url(run) for run in runs))
    if settings.records is not None and len(urls) > 1:
        raise SettingsError(
            "`records` names one place, but there are several runs", hint="start one daemon for each run"
        )
    return urls
