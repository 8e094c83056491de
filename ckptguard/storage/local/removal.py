"""Keep out of the way when somebody removes a run: a file of ours that appears meanwhile would make ``rmdir`` fail.

``rm -rf`` and ``shutil.rmtree`` read the names in a folder, remove what these name, and then the folder itself. So
nothing is created in records that another process is changing, and what was created nevertheless is taken back.
Nothing makes a run's folder again, and records that were there once are not begun again by themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ckptguard.errors import RunRemovedError
from ckptguard.storage.local.held_names import is_there
from ckptguard.values.ids import RECORDS_FOLDER, escape
from ckptguard.values.temporary_names import RECORD

QUIET = 0.05  # seconds without a change by others after which records are written
_LONGEST = 0.5  # seconds to wait for that: two processes may write the records of one run
_MOST = 20_000
_CHANGED = 256  # folders that are remembered before those are forgotten that have been quiet for long enough
_FORMAT = "format.json"
_ALONE = 10.0  # seconds after which the rest of the records stays
_TRIES = 3
_LOOKED_AT = 64  # names in a folder, and folders around it
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_Identity = tuple[int, int]
_State = tuple[int, int, int]  # of a folder: its time, which may be the same after two changes, its links, its size
_Made = TypeVar("_Made")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_lock = threading.Lock()
_homes: dict[str, _Home] = {}  # by the records' root
_changed: dict[_Identity, _State] = {}  # folders as they were after the last change that this process made
_refused: dict[str, int] = {}  # runs, and how often nothing was written because they were being removed
_own_removals: dict[str, int] = {}  # records, and how often this process removed something there
_above: dict[int, tuple[str, tuple[int, ...]]] = {}  # open folder -> its records, and the folders from there to it


@dataclass
class _Home:
    """Records as this process saw them: the run's folder, what tells these records from later ones, and what lasts."""

    run: _Identity
    first: tuple[int, int]
    lasting: set[str] = field(default_factory=set)
    missed: dict[str, float] = field(default_factory=dict)  # what went alone, and since when (monotonic)


def note_records(root: str) -> None:
    """Remember that a run has records. If they go, they are not begun again in this folder without `begin_again`."""
    if os.path.basename(root) == RECORDS_FOLDER:
        with contextlib.suppress(OSError):
            info, run = os.lstat(os.path.join(root, _FORMAT)), os.stat(os.path.dirname(root))
            home = _Home((run.st_dev, run.st_ino), (info.st_ino, info.st_mtime_ns))
            known = _homes.get(root)
            if known is None or (known.run, known.first) != (home.run, home.first):
                _remember(_homes, root, home)


def note_lasting(root: str, path: str) -> None:
    """Remember a file or folder of the records that stays as long as they do."""
    if (home := _homes.get(root)) is not None and len(home.lasting) < _MOST:
        home.lasting.add(path)
        home.missed.pop(path, None)


def was_lasting(root: str, path: str) -> bool:
    """True if this process saw this in these records: if it is missing, somebody removes them.

    What somebody removed alone is made again after a while.
    """
    home = _homes.get(root)
    if home is None or path not in home.lasting:
        return False
    if time.monotonic() - home.missed.setdefault(path, time.monotonic()) > _ALONE:
        home.lasting.discard(path)
        del home.missed[path]
        return False
    return True


def is_missing(path: str) -> bool:
    """True if a path certainly has nothing. What nobody may look at is not missing."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def were_removed(root: str) -> bool:
    """True if this process saw these records in this very folder, and they are gone, or are going."""
    home = _homes.get(root)
    if home is None or not is_missing(os.path.join(root, _FORMAT)):
        return False
    try:
        run = os.stat(os.path.dirname(root))
        return (run.st_dev, run.st_ino) == home.run
    except OSError:
        return True


def begin_again(root: str) -> None:
    """Allow that records which were removed are begun again, because somebody trains there."""
    _homes.pop(root, None)


def removed(root: str) -> RunRemovedError:
    """Return the error of a write into records that are being removed, or were."""
    run = root.split(f"/{RECORDS_FOLDER}")[0]
    _remember(_refused, run, times_refused(run) + 1)
    return RunRemovedError(f"{escape(run)} was removed, or is being removed; nothing is written there", key="")


def times_refused(run: str) -> int:
    """Return how often this process wrote nothing into a run because it was removed, or seemed to be."""
    return _refused.get(run, 0)


def note_own_removal(root: str, key: str) -> None:
    """Remember that this process has just removed this in these records."""
    _remember(_own_removals, root, own_removals(root) + 1)
    if (home := _homes.get(root)) is not None:
        home.lasting.discard(os.path.join(root, key))


def own_removals(root: str) -> int:
    """Return how often this process removed something in these records."""
    return _own_removals.get(root, 0)


def is_known_run(path: str) -> bool:
    """True if this is the folder of a run whose records this process saw: it is not made again."""
    return os.path.join(path, RECORDS_FOLDER) in _homes


def is_records(path: str) -> bool:
    """True if this is the place of a run's records inside the run."""
    return os.path.basename(path) == RECORDS_FOLDER


@contextlib.contextmanager
def writing_below(root: str, folders: Sequence[int]) -> Iterator[None]:
    """Let `make` know the open folders from the records down to the last one, in which something will be made.

    What fails in the block because a folder went is a RunRemovedError.
    """
    leaf = folders[-1]
    _above[leaf] = root, tuple(folders)
    try:
        yield
    except FileNotFoundError:
        if _is_whole(root, folders):
            raise
        raise removed(root) from None
    finally:
        _above.pop(leaf, None)


def ours(folder: int) -> None:
    """Remember that this process has just changed an open folder."""
    with contextlib.suppress(OSError):
        identity, state = _state_of(os.fstat(folder))
        with _lock:
            if len(_changed) >= _CHANGED:
                for old in [one for one, (at, *_) in _changed.items() if time.time() - at / 1e9 > QUIET]:
                    del _changed[old]
            _changed[identity] = state


def is_being_removed(folder: int) -> bool:
    """Wait while another process changes these records. True if they are being removed."""
    return folder in _above and _when_quiet(*_above[folder]) is None


def await_quiet(folder: int) -> None:
    """Wait while another process changes these records. Raises RunRemovedError if they are being removed."""
    if is_being_removed(folder):
        raise removed(_above[folder][0])


def make(folder: int, name: str, call: Callable[[], _Made], *, is_folder: bool = False) -> _Made:
    """Make something new with this name in an open folder, and return what `call` returned.

    Below records it first waits while another process changes them. If they are changed during the call, what it made
    is taken back, and it is called again. Raises RunRemovedError if they are being removed.

    A removal that has read the names in this folder is seen by the first change that it makes in the folder, below it
    or above it. Only one that reads these names right before the call, and changes nothing until right after it, fails.
    """
    if folder not in _above:
        return call()
    root, chain = _above[folder]
    for left in reversed(range(_TRIES)):
        before = _when_quiet(root, chain)
        if before is None:
            raise removed(root)
        try:
            made = call()
        except FileNotFoundError:
            if _is_whole(root, chain):
                raise
            raise removed(root) from None  # a removed folder takes nothing any more
        untouched, whole = before.lasts_in(folder, _seen(chain)), _is_whole(root, chain)
        if whole and (untouched or not left):
            ours(folder)
            return made
        _take_back(folder, name, made, is_folder=is_folder)
        if not whole:
            raise removed(root)
    raise AssertionError


class _Seen(NamedTuple):
    """What a removal changes that comes to a folder, or has begun in it."""

    around: dict[_Identity, _State]  # the folders above and below
    names: set[str]  # the first ones in the folder

    def lasts_in(self, folder: int, now: _Seen) -> bool:
        """True if nothing of it changed or went. Others may have added something to the folder."""
        went = (name for name in self.names - now.names if not is_there(folder, name))
        return self.around.items() <= now.around.items() and not any(went)


def _when_quiet(root: str, chain: Sequence[int]) -> _Seen | None:
    """Wait while others change these folders, and return what is there then. None: the records are being removed."""
    end = time.monotonic() + _LONGEST
    while _is_whole(root, chain):
        seen = _seen(chain)
        left = max(map(_unquiet, [*seen.around.items(), _state_of(os.fstat(chain[-1]))]))
        if left <= 0 or time.monotonic() >= end:
            return seen
        time.sleep(left)
    return None


def _unquiet(folder: tuple[_Identity, _State]) -> float:
    """Return for how many seconds to wait, because others have changed this folder lately."""
    identity, state = folder
    age = time.time() - state[0] / 1e9
    return QUIET - age if 0 <= age < QUIET and _changed.get(identity) != state else 0.0


def _is_whole(root: str, chain: Sequence[int]) -> bool:
    """True if these folders exist, and the records have not lost their first file."""
    if any(os.fstat(one).st_nlink == 0 for one in (chain[0], chain[-1])):
        return False
    return is_there(chain[0], _FORMAT) or root not in _homes


def _seen(chain: Sequence[int]) -> _Seen:
    seen = _Seen(dict(_state_of(os.fstat(one)) for one in chain[:-1]), set())
    _look_into(chain[-1], ".", seen)
    return seen


def _look_into(above: int, name: str, seen: _Seen) -> None:
    """Add the folders below a folder, and the first names in it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # it may be gone
        folder = os.open(name, _LIST | os.O_NOFOLLOW, dir_fd=above)
        try:
            if name != ".":
                seen.around.update([_state_of(os.fstat(folder))])
            with os.scandir(folder) as entries:
                for entry in itertools.islice(entries, _LOOKED_AT):
                    if name == "." and not RECORD.fits(entry.name):  # other threads' temporary files go by themselves
                        seen.names.add(entry.name)
                    if entry.is_dir(follow_symlinks=False) and len(seen.around) < _LOOKED_AT:
                        _look_into(folder, entry.name, seen)
        finally:
            os.close(folder)


def _state_of(info: os.stat_result) -> tuple[_Identity, _State]:
    return (info.st_dev, info.st_ino), (info.st_mtime_ns, info.st_nlink, info.st_size)


def _take_back(folder: int, name: str, made: object, *, is_folder: bool) -> None:
    if isinstance(made, int):
        os.close(made)
    with contextlib.suppress(OSError):
        (os.rmdir if is_folder else os.unlink)(name, dir_fd=folder)


def _remember(what: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    with _lock:
        if len(what) >= _MOST:
            what.clear()
        what[key] = value
