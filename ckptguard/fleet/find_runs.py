"""Find the runs of a fleet, now and again."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import msgspec

from ckptguard.errors import CkptguardError, NotFoundError, SettingsError
from ckptguard.fleet.fleet_file import FleetFile, harmless_part, parse_fleet
from ckptguard.fleet.search import RunSearch, Trouble, cause_of
from ckptguard.replicas.replicate import replica_urls
from ckptguard.runs.settings_file import Say, ignored_settings, warn_once
from ckptguard.runs.settings_origin import read_own
from ckptguard.storage import normalise_url
from ckptguard.storage.protocol import join
from ckptguard.values.byte_sizes import parse_size
from ckptguard.values.ids import escape
from ckptguard.values.settings import Settings, fits_run, with_environment, with_table

_OVERDUE = 60.0  # seconds
_WILD = frozenset("*?[")


class FleetRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a fleet. `name` is its path below the fleet's folder, or its URL where two would have one name."""

    url: str
    name: str
    settings: Settings


class PlaceState(NamedTuple):
    """How the last search of one place ended. `cause` is one of `CAUSES`; empty if all of it was searched. `seen`: it
    could be listed at least once. `failing_since` is in seconds since 1970."""

    folder: str
    cause: str
    seen: bool
    failing_since: float | None


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
        """Return a run's settings: `base`, then those of all runs, then each table whose pattern fits its name, its URL
        or a label that it has by then, in the file's order, then those of the environment. Raises SettingsError if they
        conflict."""
        found = with_table(self.base, self.file.settings, "[settings]")
        for pattern, table in self.file.runs.items():
            if fits_run(pattern, (name, url), found.labels):
                found = with_table(found, table, f'[runs."{pattern}"]')
        return with_environment(found, self.environ)

    @property
    def settings(self) -> Settings:
        """The settings that no run's own table changes."""
        return self.settings_of("", "")


def folders_of(fleet: str) -> tuple[str, ...]:
    """Return the folders and URLs in which the runs of FLEET are searched. Raises as `read_fleet`."""
    return _read(fleet, lambda sentence: None).folders


def budget_of(fleet: str) -> int | None:
    """Return what all runs of FLEET may occupy together, None for no limit. Raises as `read_fleet`."""
    total = _read(fleet, lambda sentence: None).keep_bytes
    return None if total is None else parse_size(total)


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
        self._late = late
        self._places = {folder: _Place(folder, rules) for folder in rules.file.folders}
        self._settings: dict[tuple[str, str], Settings | str] = {}

    @property
    def folders(self) -> list[str]:
        """The local folders in which a new run would be seen, as of the last `find`. None of a place that hangs."""
        return [folder for place in self._places.values() if place.search is None for folder in place.seen.folders]

    @property
    def places(self) -> list[PlaceState]:
        """How the search of each place goes. Any thread may ask."""
        return [PlaceState(p.folder, p.cause, p.was_seen, p.failing_since) for p in self._places.values()]

    def forget(self, url: str) -> None:
        """Find a run no more while only its records are left: it has ended long ago."""
        for place in self._places.values():
            place.forget(url)

    def find(self, timeout: float | None = None) -> Fleet:
        """Return the runs that are there now. After `timeout` seconds it waits no longer for places that do not
        answer: what was found there before counts."""
        places = self._places.values()
        wait([place.begin() for place in places], timeout)
        troubles: list[str] = []
        found: dict[str, _Found] = {}
        for place in places:
            place.take(self._late)
            place.failing_since = place.failing_since or time.time() if place.cause else None
            for url, run in place.seen.runs.items():
                found.setdefault(url, run)
            if place.search is None:
                troubles += [trouble.sentence for trouble in place.seen.troubles]
            elif place.is_overdue:
                troubles.append(f"{escape(place.folder)} does not answer: its runs are as they were before")
        runs = self._runs(found, troubles)
        searching = tuple(p.folder for p in places if p.search is not None and not p.is_overdue)
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
    troubles: Sequence[Trouble] = ()
    folders: Sequence[str] = ()


class _Place:
    """One place of a fleet. It is searched in a thread of its own, so that a mount that hangs holds up no other.

    `search` goes on, or has ended and was not taken yet. None: neither. `seen` was taken last.
    """

    def __init__(self, folder: str, rules: FleetRules) -> None:
        self.folder, self._rules = folder, rules
        self.search: Future[_Seen] | None = None
        self.seen = _Seen()
        self._searched: tuple[RunSearch, str] | None = None
        self._began = 0.0
        self._is_late = False
        self.was_seen = False
        self.failing_since: float | None = None

    @property
    def cause(self) -> str:
        """Why not all of it could be searched; empty if all was."""
        causes = [trouble.cause for trouble in sorted(self.seen.troubles, key=lambda one: not one.whole)]
        return "timeout" if self.is_overdue else next(iter(causes), "")

    @property
    def is_overdue(self) -> bool:
        """True if a search takes longer than any that works."""
        return self.search is not None and time.monotonic() - self._began > _OVERDUE

    def forget(self, url: str) -> None:
        """Find a run no more while only its records are left."""
        if self._searched is not None:
            search, root = self._searched[0], self._searched[1].rstrip("/")
            if f"{url}/".startswith(f"{root}/"):
                search.forget(url[len(root) :].strip("/"))

    def begin(self) -> Future[_Seen]:
        """Search, unless a search goes on, or has ended and was not taken."""
        if self.search is None:
            self.search, self._began, self._is_late = Future(), time.monotonic(), False
            try:
                threading.Thread(target=self._run, args=(self.search,), name="search", daemon=True).start()
            except RuntimeError:  # no more threads
                self._run(self.search)
        return self.search

    def take(self, late: Callable[[], None]) -> None:
        """Take the result of a search that has ended. If it goes on, `late` is called at its end. Raises what ended it,
        if that is no trouble of the place."""
        search = self.search
        if search is not None and search.done():
            self.search = None
            self.seen = search.result()
            self.was_seen = self.was_seen or not any(trouble.whole for trouble in self.seen.troubles)
        elif search is not None and not self._is_late:
            self._is_late = True
            search.add_done_callback(lambda _: late())

    def _run(self, search: Future[_Seen]) -> None:
        try:
            search.set_result(self._look())
        except Exception as error:
            search.set_exception(error)

    def _look(self) -> _Seen:
        try:
            if self._searched is None:
                root, parts = split_pattern(normalise_url(self.folder))
                self._searched = RunSearch(root, parts, self._rules.file.depth, self._rules.settings), root
            search, root = self._searched
            runs: dict[str, _Found] = {}
            for key in search.find():
                url = join(root, key).rstrip("/") or "/"
                runs[url] = _Found(key or root.rpartition("/")[2], url if "://" in url else os.path.realpath(url))
            return _Seen(runs, tuple(search.troubles), tuple(search.folders))
        except SettingsError as error:  # it names the place, and hides a secret in it
            return _Seen(troubles=(Trouble(error.message, "other", whole=True),))
        except CkptguardError as error:
            sentence = f"{escape(self.folder)} cannot be searched: {error.message}"
            return _Seen(troubles=(Trouble(sentence, cause_of(error, self.folder), whole=True),))


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
