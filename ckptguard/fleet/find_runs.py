"""Find the runs of a fleet, now and again."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ckptguard.errors import CkptguardError, NotFoundError, SettingsError
from ckptguard.fleet.fleet_file import FleetFile, parse_fleet
from ckptguard.fleet.search import Search
from ckptguard.replicas.replicate import replica_urls
from ckptguard.storage import normalise_url
from ckptguard.storage.protocol import join
from ckptguard.values.ids import escape
from ckptguard.values.settings import Settings, with_environment

_LONGEST = 1 << 20
_WILD = frozenset("*?[")


class FleetRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a fleet. `name` is its path below the fleet's folder, or its URL where two would have one name."""

    url: str
    name: str
    settings: Settings


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one moment, by URL. `troubles` says what could not be listed, one sentence each."""

    runs: tuple[FleetRun, ...] = ()
    troubles: tuple[str, ...] = ()


class FleetRules(msgspec.Struct, frozen=True, kw_only=True):
    """Where a fleet is searched, and how a run gets its settings."""

    file: FleetFile
    base: Settings
    environ: Mapping[str, str]
    flags: Mapping[str, Any]

    def fixed(self, settings: Settings) -> Settings:
        """Return the settings with those of the environment and the flags, which stand above a fleet file."""
        return with_environment(settings, self.environ).changed(**self.flags)

    def settings_of(self, name: str, url: str) -> Settings:
        """Return the settings of one run. Raises SettingsError."""
        return self.file.settings_of(name, url, self.base, self.fixed)

    @property
    def settings(self) -> Settings:
        """The settings that no run's own table changes."""
        return self.file.settings_of("", "", self.base, self.fixed)


def read_fleet(
    fleet: str, settings: Settings, *, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> FleetRules:
    """Read what FLEET is: a folder, a URL, or a fleet file. Nothing is searched yet.

    `settings` are those of every door. What `environ` and `flags` set of them stands above the file.

    Raises:
        NotFoundError: there is no such folder or file.
        SettingsError: it is no fleet file, or a wrong one.
    """
    place = normalise_url(fleet)
    file = FleetFile(folders=(place,))
    if "://" not in place and "::" not in place and not _is_pattern(place):
        if not os.path.lexists(place):
            raise NotFoundError(f"there is no folder or fleet file {escape(place)}", hint="check the path")
        if not os.path.isdir(place):
            file = parse_fleet(_text_of(place), place)
    rules = FleetRules(file=file, base=settings, environ=environ or {}, flags=flags or {})
    if rules.settings.records is not None:  # a conflict of the file with what stands above it is told here, too
        raise SettingsError(
            "`records` names one place, but a fleet has several runs",
            hint='set it for one run, in the table [runs."NAME"] of a fleet file',
        )
    return rules


def find_runs(
    fleet: str, settings: Settings, *, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Fleet:
    """Find the runs of FLEET once. The arguments and errors are those of `read_fleet`."""
    return Discovery(read_fleet(fleet, settings, environ=environ, flags=flags)).find()


class Discovery:
    """Finds the runs of a fleet again and again. Local folders that did not change are not listed again."""

    def __init__(self, rules: FleetRules) -> None:
        self.rules = rules
        self._searches: dict[str, Search] = {}
        self._settings: dict[tuple[str, str], Settings | str] = {}

    @property
    def folders(self) -> list[str]:
        """The local folders in which a new run would be seen, as of the last `find`."""
        return [folder for search in self._searches.values() for folder in search.folders]

    def find(self) -> Fleet:
        """Return the runs that are there now."""
        troubles: list[str] = []
        found: dict[str, str] = {}  # URL -> path below the fleet's folder
        for folder in self.rules.file.folders:
            try:
                search, root = self._search(folder)
                for key in search.find():
                    found.setdefault(join(root, key).rstrip("/") or "/", key or root.rpartition("/")[2])
                troubles += search.troubles
            except SettingsError as error:  # it names the place, and hides a secret in it
                troubles.append(error.message)
            except CkptguardError as error:
                troubles.append(f"{escape(folder)} cannot be searched: {error.message}")
        runs = self._runs(found, troubles)
        return Fleet(runs=tuple(runs), troubles=tuple(dict.fromkeys(troubles)))

    def _search(self, folder: str) -> tuple[Search, str]:
        root, parts = split_pattern(normalise_url(folder))
        if folder not in self._searches:
            self._searches[folder] = Search(root, parts, self.rules.file.depth, self.rules.settings)
        return self._searches[folder], root

    def _runs(self, found: Mapping[str, str], troubles: list[str]) -> Iterable[FleetRun]:
        names = names_of(_outermost(found))
        known, self._settings = self._settings, {}
        runs = []
        for url, name in names.items():
            if not self.rules.file.wants(name, url):
                continue
            settings = known.get((name, url)) or self._settings_of(name, url)
            self._settings[name, url] = settings
            if isinstance(settings, str):
                troubles.append(settings)
            else:
                runs.append(FleetRun(url=url, name=name, settings=settings))
        replicas = {url for run in runs for url in replica_urls(run.url, run.settings)}
        return [run for run in runs if run.url not in replicas]

    def _settings_of(self, name: str, url: str) -> Settings | str:
        """Return a run's settings, equal ones as one object; or why it has none."""
        try:
            found = self.rules.settings_of(name, url)
        except SettingsError as error:
            return f"{escape(url)} is left out: {error.message}"
        if found.records is not None and any(
            isinstance(one, Settings) and one.records == found.records for one in self._settings.values()
        ):
            return f"{escape(url)} is left out: its `records` are those of another run"
        return next((one for one in self._settings.values() if one == found), found)


def split_pattern(place: str) -> tuple[str, tuple[str, ...]]:
    """Split a place into the part to list from and the patterns for names below it. SettingsError without the first."""
    if not _is_pattern(place):
        return place, ()
    parts = place.split("/")
    wild = next(number for number, part in enumerate(parts) if _WILD & set(part))
    root = "/".join(parts[:wild]) or "/"
    if root.endswith(":/") or "**" in parts:
        raise SettingsError(
            f"{escape(place)} cannot be searched: a pattern stands for a name below a bucket, and ** for nothing",
            hint="name the bucket, and use `depth` for more levels",
        )
    return root, tuple(parts[wild:])


def names_of(found: Mapping[str, str]) -> dict[str, str]:
    """Return a name for each URL that no other has: its path below the fleet's folder, or else the URL."""
    times = Counter(found.values())
    return {url: name if times[name] == 1 else url for url, name in found.items()}


def _outermost(found: Mapping[str, str]) -> dict[str, str]:
    """Leave out runs inside others, and second spellings of one place."""
    places = {url: url if "://" in url else os.path.realpath(url) for url in found}
    kept: dict[str, str] = {}
    for url in sorted(found, key=lambda url: (places[url] + "/", url)):
        last = next(reversed(kept), None)
        if last is None or not f"{places[url]}/".startswith(f"{places[last]}/"):
            kept[url] = found[url]
    return kept


def _is_pattern(place: str) -> bool:
    return bool(_WILD & set(place)) and ("://" in place or not os.path.lexists(place))


def _text_of(path: str) -> str:
    if not os.path.isfile(path):  # a FIFO would block
        raise SettingsError(f"{escape(path)} is neither a folder nor a fleet file")
    try:
        with open(path, "rb") as file:
            text = file.read(_LONGEST + 1)
    except OSError as error:
        raise SettingsError(f"cannot read the fleet file {escape(path)}: {error.strerror}") from error
    if len(text) > _LONGEST:
        raise SettingsError(f"{escape(path)} is too large for a fleet file")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{escape(path)} is no fleet file: it is not UTF-8 text") from error
