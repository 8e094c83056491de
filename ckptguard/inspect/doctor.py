"""Probe what a storage really does, and say what follows for who keeps checkpoints there."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from ckptguard.decisions.store_requests import SAVE_REQUESTS, cost_of_looks, cost_of_save, longest_pause
from ckptguard.errors import (
    CkptguardError,
    CouldNotTellError,
    DeniedError,
    ObjectExistsError,
    ObjectMissingError,
    StoppedError,
)
from ckptguard.runs.removal import remove_temporary
from ckptguard.storage import Storage, normalise_url, open_storage
from ckptguard.storage.failures import machine_trouble
from ckptguard.storage.local.inotify import Inotify
from ckptguard.storage.local.writes import has_locks
from ckptguard.storage.opening import import_library
from ckptguard.storage.retries import Retries
from ckptguard.storage.traits import traits_of_url
from ckptguard.values.ids import escape
from ckptguard.values.settings import Settings
from ckptguard.values.storage_options import NO_OPTIONS, StorageOptions
from ckptguard.values.temporary_names import DOCTOR

LIMIT = 7.5  # seconds for all probes together, unless more are given: a whole call takes less than 10
_GRACE = 0.9  # seconds to remove what was written when time is up
_TIMEOUT = 2.0  # seconds in which a listing may catch up
_CLOCK = 5.0  # seconds by which clocks may differ without a word
_MEGABYTE = 1 << 20
_INTERVAL = Settings().scan_interval


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One question to a storage: its answer ("yes", "no", "unknown"), a number where there is one, what follows."""

    name: str
    answer: str
    value: float | None = None
    means: str


class StorageDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All probes of a storage. `outcome`: "good", "limited" (usable, with the restrictions that the probes name),
    "bad" (must not hold checkpoints), "unknown" (a probe could not be made)."""

    url: str
    outcome: str
    probes: tuple[Probe, ...]
    seconds: float


class _Answer(NamedTuple):
    """What one probe found; None: it cannot be told. Without `means` the table has the sentence."""

    answer: bool | None
    means: str = ""
    value: float | None = None


# What a "no" makes of the whole; the other probes only inform.
_UNSAFE = {"read after write", "ranged reads", "overwrites"}
_LIMITING = {"write", "exclusive create", "listing after write", "delete"}
_NAMES = (
    *("write", "exclusive create", "read after write", "ranged reads", "overwrites", "listing after write", "delete"),
    *("large objects", "clock", "free space", "round trip", "locks", "links", "reflinks", "inotify", "requests"),
)
# What follows from a "yes", and from a "no".
_MEANS = {
    "exclusive create": (
        "if several processes write at once, exactly one wins: several may guard this run",
        "the store silently replaces what exists: let only one process at a time write here, so one daemon, "
        "or the training alone",
    ),
    "read after write": (
        "a checkpoint can be read back as soon as it is written",
        "what was just written is not what is read: no verdict on this storage can be trusted",
    ),
    "ranged reads": (
        "files are verified in pieces, with little memory",
        "a part of a file differs from the whole file: no verdict on this storage can be trusted",
    ),
    "overwrites": (
        "a replaced file is read anew at once",
        "a replaced file is still read as it was: damage and new saves stay hidden",
    ),
    "listing after write": (
        "new checkpoints are seen at the next look",
        "listings lag behind: new checkpoints are seen later, and nothing young may be removed",
    ),
    "delete": ("old checkpoints can be removed", "removed files stay: pruning frees no space"),
    "large objects": (
        "uploads of large files are exclusive too",
        "if one file is uploaded twice at the same time, the later upload stays; the records are not affected",
    ),
    "locks": (
        "processes that move files of a run wait for each other",
        "processes that move the same files of a run do not wait for each other: one of them fails",
    ),
    "links": (
        "a kept copy can be a hard link: it costs no space, but it shares damaged blocks (see `keep`)",
        "a kept copy costs its full size here",
    ),
    "reflinks": (
        "a kept copy costs no space until one side changes",
        "only full copies are independent of the trainer's files",
    ),
    "inotify": (
        "saves of this machine are seen at once, those of other machines by the timer (`scan_interval`)",
        "the daemon looks by its timer (`scan_interval`); if inotify's limits are the reason, raise "
        "fs.inotify.max_user_watches and fs.inotify.max_user_instances",
    ),
}


def diagnose(url: str, options: StorageOptions = NO_OPTIONS, *, seconds: float | None = None) -> StorageDiagnosis:
    """Probe the storage at a URL, and remove what the probes wrote. They take at most `seconds`, 7.5 by default.

    NotFoundError if there is no folder, on storage that has folders. CouldNotTellError if the storage is out of reach,
    does not answer, or may not even be listed. A probe that fails is no error: its answer is "unknown".
    """
    if "://" in (place := normalise_url(url)):
        import_library(place)  # nothing of this is the storage's time
    begun = time.monotonic()
    limit = LIMIT if seconds is None else seconds
    stop = threading.Event()
    probing = _Probing(url, options, Retries(attempts=2, first=0.1, total=3.0, stop=stop))
    thread = threading.Thread(target=probing.run, daemon=True, name="ckptguard-doctor")
    thread.start()
    try:
        thread.join(limit)
    finally:
        stop.set()
        thread.join(_GRACE if probing.found else 0)
    if probing.failed is not None:
        raise probing.failed
    found = dict(probing.found)  # a thread that hangs may still add to it
    late = f"no answer within {limit:g} s"
    if not found:
        place = escape(probing.url or place)
        raise CouldNotTellError(f"{place}: {late}", hint=f"ckptguard doctor {place} --seconds {8 * limit:g}")
    probes = tuple(found.get(name) or Probe(name=name, answer="unknown", means=late) for name in _NAMES)
    return StorageDiagnosis(
        url=probing.url or url, outcome=_outcome(probes), probes=probes, seconds=round(time.monotonic() - begun, 3)
    )


def _outcome(probes: tuple[Probe, ...]) -> str:
    refused = {probe.name for probe in probes if probe.answer == "no"}
    unsure = {probe.name for probe in probes if probe.answer == "unknown"}
    if refused & _UNSAFE:
        return "bad"
    if "write" in refused:
        return "limited"
    if unsure & (_UNSAFE | _LIMITING):
        return "unknown"
    return "limited" if refused & _LIMITING else "good"


class _Probing:
    """The probes one after another, so that those that were made count when time runs out."""

    def __init__(self, url: str, options: StorageOptions, retries: Retries) -> None:
        self._retries = retries
        self._opening = functools.partial(open_storage, url, options=options)
        self.url: str | None = None
        self.found: dict[str, Probe] = {}
        self.failed: CkptguardError | None = None
        self._folder = DOCTOR.new()
        self._times: list[float] = []
        self._storage: Storage

    def run(self) -> None:
        try:
            self._storage = self._opening(must_exist=False, retries=self._retries)
            self.url = self._storage.url
            if self._storage.root is not None:
                self._opening()  # a mistyped path is no folder to make; a prefix need not be there
            self._all()
        except CkptguardError as error:
            self.failed = error

    def _all(self) -> None:
        try:
            self._tell("write", self._write())  # what fails here fails altogether
            if self.found["write"].answer != "yes":
                for name in set(_NAMES) - {"write", "free space"}:
                    self._tell(name, _Answer(None, "not probed: nothing can be written"))
                self._ask("free space")
                return
            for name in _NAMES[1:]:
                self._ask(name)
        finally:
            # Even when time is up: what the probes wrote must go.
            for _ in range(2):  # what fails once may well work the next time
                with contextlib.suppress(CouldNotTellError):
                    remove_temporary(self._opening(must_exist=False), self._folder)
                    break

    def _ask(self, name: str) -> None:
        """Make the probe of this name, by the method of this name. A stopped probe has no answer."""
        try:
            found = getattr(self, "_" + name.replace(" ", "_"))()
        except StoppedError:
            return
        except Exception as error:
            reported = error if isinstance(error, CouldNotTellError) else machine_trouble(error)
            if reported is None:
                raise
            found = _Answer(None, f"could not tell: {reported.message}")
        self._tell(name, found if isinstance(found, _Answer) else _Answer(found))

    def _tell(self, name: str, found: _Answer) -> None:
        word = "unknown" if found.answer is None else "yes" if found.answer else "no"
        means = found.means or _MEANS[name][not found.answer]
        self.found[name] = Probe(name=name, answer=word, value=found.value, means=means)

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _create(self, name: str, data: bytes) -> None:
        begun = time.monotonic()
        self._storage.create(self._key(name), data)
        self._times.append(time.monotonic() - begun)

    def _read(self, name: str) -> bytes:
        with self._storage.open(self._key(name)) as reader:
            return reader.read(0, reader.entry.size)

    def _write(self) -> _Answer:
        try:
            self._create("first", b"first")
        except DeniedError as error:
            with contextlib.suppress(ObjectMissingError):
                self._storage.list("")  # who may not do this either can do nothing here: without credentials, say
            return _Answer(False, f"checkpoints can be verified here, but nothing is recorded: {error.message}")
        return _Answer(True, "manifests and verdicts can be recorded here")

    def _exclusive_create(self) -> bool:
        def race(number: int) -> bool:
            try:
                self._storage.create(self._key("raced"), b"%d" % number)
            except ObjectExistsError:
                return False
            return True

        said = self._storage.capabilities().exclusive_create
        with ThreadPoolExecutor(4) as racers:
            winners = [number for number, won in enumerate(racers.map(race, range(4))) if won]
        return said and len(winners) == 1 and self._read("raced") == b"%d" % winners[0]

    def _read_after_write(self) -> bool:
        data = secrets.token_bytes(4096)
        self._create("read", data)
        return self._read("read") == data

    def _ranged_reads(self) -> bool:
        data = secrets.token_bytes(_MEGABYTE)
        self._create("ranges", data)
        with self._storage.open(self._key("ranges")) as reader:
            ranges = ((0, 1), (1, 4096), (_MEGABYTE // 2, 10_000), (_MEGABYTE - 1, 1))
            return all(reader.read(at, length) == data[at : at + length] for at, length in ranges)

    def _overwrites(self) -> bool:
        with self._storage.upload(self._key("read"), replace=True) as upload:
            upload.write(b"replaced")
            upload.commit()
        return self._read("read") == b"replaced"

    def _listing_after_write(self) -> _Answer:
        begun = time.monotonic()
        self._create("listed", b"1")
        late = None
        while time.monotonic() - begun < _TIMEOUT:
            if self._key("listed") in [entry.key for entry in self._storage.list(self._folder)]:
                late = round(time.monotonic() - begun, 3)
                break
            time.sleep(0.05)
        # One round of asking is no delay of the store.
        return _Answer(late is not None and late <= 0.05 + 3 * max(self._times), value=late)

    def _delete(self) -> bool:
        remove_temporary(self._storage, self._key("first"))
        try:
            self._storage.stat(self._key("first"))
        except ObjectMissingError:
            return True
        return False

    def _clock(self) -> _Answer:
        now = time.time()
        self._create("clock", b"1")
        reported = self._storage.stat(self._key("clock")).mtime_ns
        if reported is None:
            return _Answer(None, "the store tells no times: ages are taken from this machine's clock")
        offset = round(reported / 1e9 - (now + time.time()) / 2, 3)
        # Many stores tell whole seconds.
        if abs(offset) <= _CLOCK:
            return _Answer(True, "it agrees with this machine's", offset)
        return _Answer(False, f"it differs from this machine's by {offset:+.0f} s: set one of them", offset)

    def _free_space(self) -> _Answer:
        free = self._storage.free_space()
        if free is None:
            return _Answer(None, "the store does not say: a full one is noticed when a save fails")
        means = f"{free / 1e9:.1f} GB: saves, restores and copies are refused before they run out"
        return _Answer(free > 0, means, float(free))

    def _round_trip(self) -> _Answer:
        middle = statistics.median(self._times)
        return _Answer(True, f"a small write takes {middle * 1000:.0f} ms", round(middle, 4))

    def _locks(self) -> bool:
        root = self._storage.root
        return root is not None and has_locks(os.path.join(root, self._key("ranges")))

    def _links(self) -> bool:
        return self._storage.copy(self._key("ranges"), self._key("linked"), how="link") != "copy"

    def _reflinks(self) -> bool:
        return self._storage.copy(self._key("ranges"), self._key("cloned"), how="clone") == "reflink"

    def _inotify(self) -> _Answer:
        root = self._storage.root
        if root is None:
            return _Answer(False, "the daemon looks by its timer (`scan_interval`)")
        return _Answer(_events_arrive(f"{root}/{self._folder}"))

    def _requests(self) -> _Answer:
        if not traits_of_url(self._storage.url).flat_listing:
            return _Answer(False, "no request costs money here")
        idle, busy = (cost_of_looks([pause]) for pause in (longest_pause(_INTERVAL), _INTERVAL))
        means = (
            f"an idle run takes {idle.requests:,} listings a month for each 1,000 objects (${idle.dollars:.2f}). "
            f"One that is saved all the time takes at most {busy.requests:,} (${busy.dollars:.2f}). "
            f"A new save takes at most {SAVE_REQUESTS} requests besides its bytes (${cost_of_save():.5f})"
        )
        return _Answer(True, means, idle.dollars)

    def _large_objects(self) -> bool:
        return self._storage.capabilities().exclusive_upload


def _events_arrive(folder: str) -> bool:
    """True if a new file in this local folder is told within a second; leaves the file there."""
    try:
        inotify = Inotify()
    except OSError:  # no instances left, or another system
        return False
    try:
        inotify.add(folder)
        with open(os.path.join(folder, "watched"), "wb"):
            pass
        return bool(inotify.read(1.0))
    except OSError as error:
        if error.errno != errno.ENOSPC:  # no watches left
            raise
        return False
    finally:
        inotify.end()


def words(diagnosis: StorageDiagnosis) -> str:
    """The whole in one sentence."""
    place = escape(diagnosis.url)
    return {
        "good": f"{place} can hold checkpoints without restriction",
        "limited": f"{place} can hold checkpoints, with the restrictions below",
        "bad": f"{place} must not hold checkpoints",
        "unknown": f"could not find out everything about {place}",
    }[diagnosis.outcome]
