"""Find the runs of a fleet, now and again."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ckptguard.errors import CkptguardError, NotFoundError, SettingsError
from ckptguard.fleet.fleet_file import FleetFile, harmless_part, parse_fleet
from ckptguard.fleet.search import Search
from ckptguard.replicas.replicate import replica_urls
from ckptguard.runs.settings_file import Say, ignored_settings, warn_once
from ckptguard.runs.settings_origin import read_own
from ckptguard.storage import normalise_url
from ckptguard.storage.protocol import join
from ckptguard.values.ids import escape
from ckptguard.values.settings import Settings

_OVERDUE = 60.0  # seconds
_WILD = frozenset("*?[")


class FleetRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a fleet. `name` is its path below the fleet's folder, or its URL where two would have one name."""

    url: str
    name: str
    settings: Settings


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one moment, by URL. `troubles` says what could not be listed, one sentence each. `searching` are the
    places whose search goes on."""

    runs: tuple[FleetRun, ...] = ()
    troubles: tuple[str, ...] = ()
    searching: tuple[str, ...] = ()


class FleetRules(msgspec.Struct, frozen=True, kw_only=True):
    """Where a fleet is searched, and how a run gets its settings."""

    file: FleetFile
    base: Settings
    environ: Mapping[str, str]

    def settings_of(self, name: str, url: str) -> Settings:
        """Return the settings of one run. Raises SettingsError."""
        return self.file.settings_of(name, url, self.base, self.environ)

    @property
    def settings(self) -> Settings:
        """The settings that no run's own table changes."""
        return self.file.settings_of("", "", self.base, self.environ)


def folders_of(fleet: str) -> tuple[str, ...]:
    """Return the folders and URLs in which the runs of FLEET are searched. Raises as `read_fleet`."""
    return _read(fleet, lambda sentence: None).folders


def read_fleet(
    fleet: str,
    settings: Settings,
    *,
    environ: Mapping[str, str] | None = None,
    say: Say = warn_once,
) -> FleetRules:
    """Read what FLEET is: a folder, a URL, or a fleet file. Nothing is searched yet.

    `settings` are those of every door. What `environ` sets of them stands above the file. A file that
    another user may have written gives no URLs and only `HARMLESS` settings, and `say` gets a sentence about the rest.

    Raises:
        NotFoundError: there is no such folder or file.
        SettingsError: it is no fleet file, or a wrong one.
    """
    rules = FleetRules(file=_read(fleet, say), base=settings, environ=environ or {})
    if rules.settings.records is not None:  # a conflict of the file with what stands above it is told here, too
        raise SettingsError(
            "`records` names one place, but a fleet has several runs",
            hint='set it for one run, in the table [runs."NAME"] of a fleet file',
        )
    return rules


def _read(fleet: str, say: Say) -> FleetFile:
    place = normalise_url(fleet)
    if "://" in place or "::" in place or _is_pattern(place):
        return FleetFile(folders=(place,))
    if not os.path.lexists(place):
        raise NotFoundError(f"there is no folder or fleet file {escape(place)}", hint="check the path")
    if os.path.isdir(place):
        return FleetFile(folders=(place,))
    if not os.path.isfile(place):  # a FIFO would block
        raise SettingsError(f"{escape(place)} is neither a folder nor a fleet file")
    text, doubt = read_own(place, "fleet", named=True)
    file = parse_fleet(text, place)
    if doubt is None:
        return file
    harmless, ignored = harmless_part(file)
    if ignored:
        say(ignored_settings(place, ignored, doubt))
    if not harmless.folders:
        raise SettingsError(f"{escape(place)} names only URLs, but {doubt.why}", hint=doubt.remedy)
    return harmless


def find_runs(fleet: str, settings: Settings, **how: Any) -> Fleet:
    """Find the runs of FLEET once. The arguments and errors are those of `read_fleet`."""
    return Discovery(read_fleet(fleet, settings, **how)).find()


class Discovery:
    """Finds the runs of a fleet again and again. Local folders that did not change are not listed again.

    `late` is called when a place has been searched for which `find` did not wait.
    """

    def __init__(self, rules: FleetRules, late: Callable[[], None] = lambda: None) -> None:
        self.rules = rules
        self._places = {folder: _Place(folder, rules, late) for folder in rules.file.folders}
        self._settings: dict[tuple[str, str], Settings | str] = {}

    @property
    def folders(self) -> list[str]:
        """The local folders in which a new run would be seen, as of the last `find`. None of a place that hangs."""
        return [folder for place in self._places.values() if place.is_done for folder in place.seen.folders]

    def forget(self, url: str) -> None:
        """Find a run no more while only its records are left: it has ended long ago."""
        for place in self._places.values():
            place.forget(url)

    def find(self, patience: float | None = None) -> Fleet:
        """Return the runs that are there now. After `patience` seconds it waits no longer for places that do not
        answer: what was found there before counts."""
        places = self._places.values()
        for place in places:
            place.begin()
        deadline = math.inf if patience is None else time.monotonic() + patience
        answered = {place.folder for place in places if place.wait(deadline)}
        troubles: list[str] = []
        found: dict[str, _Found] = {}
        for place in places:
            seen = place.take()
            for url, run in seen.runs.items():
                found.setdefault(url, run)
            if place.folder in answered:
                troubles += seen.troubles
            elif place.is_overdue:
                troubles.append(f"{escape(place.folder)} does not answer: its runs are as they were before")
        runs = self._runs(found, troubles)
        searching = tuple(p.folder for p in places if p.folder not in answered and not p.is_overdue)
        return Fleet(runs=tuple(runs), troubles=tuple(dict.fromkeys(troubles)), searching=searching)

    def _runs(self, found: Mapping[str, _Found], troubles: list[str]) -> Iterable[FleetRun]:
        names = names_of(_outermost(found))
        known, self._settings = self._settings, {}
        runs = []
        for url, name in names.items():
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


class _Found(NamedTuple):
    """A run by its path below the fleet's folder, and where that really is."""

    name: str
    place: str


class _Seen(NamedTuple):
    """The result of one search of one place."""

    runs: Mapping[str, _Found] = {}
    troubles: Sequence[str] = ()
    folders: Sequence[str] = ()
    error: Exception | None = None


class _Place:
    """One place of a fleet. It is searched in a thread of its own, so that a mount that hangs holds up no other."""

    def __init__(self, folder: str, rules: FleetRules, late: Callable[[], None]) -> None:
        self.folder, self._rules, self._late = folder, rules, late
        self.seen = _Seen()
        self._search: tuple[Search, str] | None = None
        self._changed = threading.Condition()
        self._searches = self._is_awaited = False
        self._is_new = False  # what was seen was not taken yet
        self._began = 0.0

    @property
    def is_done(self) -> bool:
        """True if no search goes on."""
        return not self._searches

    @property
    def is_overdue(self) -> bool:
        """True if a search takes longer than any that works."""
        return self._searches and time.monotonic() - self._began > _OVERDUE

    def forget(self, url: str) -> None:
        """Find a run no more while only its records are left."""
        search = self._search
        if search is not None and f"{url}/".startswith(f"{search[1].rstrip('/')}/"):
            search[0].forget(url[len(search[1].rstrip("/")) :].strip("/"))

    def begin(self) -> None:
        """Search, unless a search goes on, or one has ended for which nobody waited."""
        with self._changed:
            if self._searches or self._is_new:
                return
            self._searches, self._began = True, time.monotonic()
        try:
            threading.Thread(target=self._run, name="search", daemon=True).start()
        except RuntimeError:  # no more threads
            self._run()

    def wait(self, deadline: float) -> bool:
        """Wait until the search has ended, at most until then. True if it has."""
        with self._changed:
            self._is_awaited = True
            left = None if deadline == math.inf else deadline - time.monotonic()
            self._changed.wait_for(lambda: not self._searches, left)
            self._is_awaited = False
            return not self._searches

    def take(self) -> _Seen:
        """Return what was seen last. Raises what ended the search, if that is no trouble of the place."""
        with self._changed:
            self._is_new = False
            if self.seen.error is not None:
                raise self.seen.error
            return self.seen

    def _run(self) -> None:
        try:
            seen = self._look()
        except Exception as error:
            seen = self.seen._replace(error=error)
        with self._changed:
            self.seen, self._searches, self._is_new = seen, False, True
            is_late = not self._is_awaited
            self._changed.notify_all()
        if is_late:
            self._late()

    def _look(self) -> _Seen:
        try:
            if self._search is None:
                root, parts = split_pattern(normalise_url(self.folder))
                self._search = Search(root, parts, self._rules.file.depth, self._rules.settings), root
            search, root = self._search
            runs: dict[str, _Found] = {}
            for key in search.find():
                url = join(root, key).rstrip("/") or "/"
                runs[url] = _Found(key or root.rpartition("/")[2], url if "://" in url else os.path.realpath(url))
            return _Seen(runs, tuple(search.troubles), tuple(search.folders))
        except SettingsError as error:  # it names the place, and hides a secret in it
            return _Seen(troubles=(error.message,))
        except CkptguardError as error:
            return _Seen(troubles=(f"{escape(self.folder)} cannot be searched: {error.message}",))


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


def _outermost(found: Mapping[str, _Found]) -> dict[str, str]:
    """Leave out runs inside others, and second spellings of one place. Returns the names by URL."""
    kept: dict[str, str] = {}
    last = ""
    for url in sorted(found, key=lambda url: (found[url].place + "/", url)):
        if not last or not f"{found[url].place}/".startswith(f"{last}/"):
            kept[url], last = found[url].name, found[url].place
    return kept


def _is_pattern(place: str) -> bool:
    return bool(_WILD & set(place)) and ("://" in place or not os.path.lexists(place))
