"""Hints that something changed. Missing hints only cause delay: the loop also checks on a timer, and only the storage
counts."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from ckptguard.reporting.notify import Log
from ckptguard.storage.local import inotify
from ckptguard.storage.local.inotify import FileEvent, Inotify
from ckptguard.storage.local.mounts import is_below, mount_of, mounts
from ckptguard.values.ids import RECORDS_FOLDER

_AGAIN = 600.0  # seconds until a folder that could not be watched is tried again
_TOGETHER = 0.02  # seconds for which changes are collected: the kernel then counts equal ones as one
_NO_MORE = (errno.ENOSPC, errno.EMFILE, errno.ENFILE)
# File systems whose every change goes through this kernel, so that a watch misses none.
_OWN_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "zfs", "f2fs"})
_NAMES = (
    inotify.CREATE | inotify.DELETE | inotify.MOVED_FROM | inotify.MOVED_TO | inotify.DELETE_SELF | inotify.MOVE_SELF
)
_HINT = "raise fs.inotify.max_user_watches and fs.inotify.max_user_instances with sysctl"


class _Tree:
    """A watched folder, with what lies below it if it is `deep`. `whole`: nothing in it can change unseen."""

    def __init__(self, root: str, key: str, *, deep: bool) -> None:
        self.root, self.key, self.deep = root, key, deep
        self.inode: tuple[int, int] | None = None
        self.watches: set[int] = set()
        self.whole = self.blind = False  # blind: some folder in it cannot be watched
        self.touched = True
        self.tried_at = float("-inf")


class Watcher:
    """Calls `wake` with the key of a local folder in which something changed, except our own records.

    One descriptor and one thread serve all folders. Where the system has no watches left, it says so once, and tries
    again later. Any thread may call it, and nothing here raises.
    """

    def __init__(self, wake: Callable[[str], None], log: Log) -> None:
        self._wake, self._log = wake, log
        self._lock = threading.RLock()
        self._inotify: Inotify | None = None
        self._trees: dict[str, dict[str, _Tree]] = {}  # by key and root
        self._paths: dict[int, tuple[str, list[_Tree]]] = {}
        self._complained = False
        self._most = inotify.fair_share()

    def watch(self, root: str, key: str, *, deep: bool = True) -> None:
        """Watch a folder, if it exists and is not watched, or was replaced."""
        try:
            found = os.stat(root)  # without the lock: a mount that hangs must stop nobody else
        except OSError:
            found = None
        with self._lock:
            tree = self._trees.setdefault(key, {}).setdefault(root, _Tree(root, key, deep=deep))
            if found is None:
                self._drop(tree)
                tree.tried_at = float("-inf")
                return
            inode = (found.st_dev, found.st_ino)
            if tree.inode == inode or (tree.inode is None and time.monotonic() < tree.tried_at + _AGAIN):
                return
            self._drop(tree)
            self._begin(tree, inode)

    def keep(self, key: str, roots: Iterable[str]) -> None:
        """Watch exactly these folders, without what lies below them, with this key."""
        with self._lock:
            wanted = set(roots)
            trees = self._trees.get(key, {})
            for root in trees.keys() - wanted:
                self._drop(trees.pop(root))
        for root in wanted:
            self.watch(root, key, deep=False)

    def forget(self, key: str) -> None:
        """Watch the folders of this key no longer."""
        with self._lock:
            for tree in self._trees.pop(key, {}).values():
                self._drop(tree)

    def settle(self, key: str) -> None:
        """Count what changed in the folders of this key from now on."""
        with self._lock:
            for tree in self._trees.get(key, {}).values():
                tree.touched = False

    def rests(self, key: str) -> bool:
        """True if for certain nothing changed in the folders of this key since `settle`."""
        with self._lock:
            trees = self._trees.get(key, {}).values()
            return self.sees_all(key) and not any(tree.touched for tree in trees)

    def sees_all(self, key: str) -> bool:
        """True if for certain every change in the folders of this key is hinted at."""
        with self._lock:
            trees = self._trees.get(key, {}).values()
            return bool(trees) and all(tree.whole for tree in trees)

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            reader, self._inotify = self._inotify, None
            self._trees.clear()
            self._paths.clear()
        if reader is not None:
            reader.end()

    def _all(self) -> list[_Tree]:
        return [tree for trees in self._trees.values() for tree in trees.values()]

    # The rest is called with the lock held.

    def _begin(self, tree: _Tree, inode: tuple[int, int]) -> None:
        tree.touched, tree.tried_at = True, time.monotonic()
        try:
            if self._inotify is None:
                self._inotify = Inotify()
                threading.Thread(target=self._read, args=(self._inotify,), name="watch", daemon=True).start()
            self._add(tree, tree.root)
        except Exception as error:  # no watches left, an unusual file system, ...
            self._drop(tree)
            if not self._complained:
                no_more = isinstance(error, OSError) and error.errno in _NO_MORE
                reason = f"{error.strerror or error}" if isinstance(error, OSError) else f"{error}"
                self._complained = True
                self._log(
                    "watching_by_timer_only",
                    level="warning",
                    folder=tree.root,
                    reason=f"{reason}: {_HINT}" if no_more else reason,
                )
            return
        tree.inode, tree.whole = inode, tree.deep and not tree.blind and _is_own_disk(tree.root)
        if self._complained and all(one.inode is not None for one in self._all()):
            self._complained = False

    def _add(self, tree: _Tree, top: str) -> None:
        """Watch a folder and, if the tree is deep, those below it. Raises OSError."""
        assert self._inotify is not None
        for path in _folders(top) if tree.deep else (top,):
            if len(self._paths) >= self._most:
                raise OSError(errno.ENOSPC, f"there are more than {self._most} folders to watch")
            try:
                # The user named the root, so it may be a link: with a slash behind it, that is followed.
                watch = self._inotify.add(os.path.join(path, "") if path == tree.root else path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PermissionError:
                if path == tree.root:
                    raise
                tree.blind, tree.whole = True, False  # the timer looks there
                continue
            trees = self._paths.get(watch, ("", []))[1]
            self._paths[watch] = (path, trees)  # it may have been renamed
            if tree not in trees:
                trees.append(tree)
            tree.watches.add(watch)

    def _drop(self, tree: _Tree, below: str | None = None) -> None:
        """Watch a tree no longer, or only what was below a path."""
        for watch in list(tree.watches):
            path, trees = self._paths.get(watch, ("", []))
            if below is not None and path != below and not path.startswith(f"{below}/"):
                continue
            tree.watches.discard(watch)
            if tree in trees:
                trees.remove(tree)
            if not trees and self._paths.pop(watch, None) is not None and self._inotify is not None:
                self._inotify.remove(watch)
        if below is None:
            tree.inode, tree.whole, tree.blind, tree.touched = None, False, False, True

    def _read(self, reader: Inotify) -> None:
        """The thread: collect changes, and wake."""
        try:
            while (changes := reader.read()) is not None:
                with self._lock:
                    woken = {key for change in changes for key in self._keys_of(change)}
                for key in woken:
                    self._wake(key)
                time.sleep(_TOGETHER)
        except Exception as error:
            self._log("watching_by_timer_only", level="error", folder="/", reason=f"{type(error).__name__}: {error}")
            with self._lock:
                for tree in self._all():
                    self._drop(tree)
                if self._inotify is reader:
                    self._inotify = None
        finally:
            reader.end()

    def _keys_of(self, change: FileEvent) -> Iterator[str]:
        """Note a change, and yield the keys to wake."""
        if change.mask & inotify.OVERFLOW:  # changes were lost
            for tree in self._all():
                tree.touched = True
                yield tree.key
            return
        path, trees = self._paths.get(change.watch, ("", []))
        if change.mask & inotify.IGNORED:
            self._paths.pop(change.watch, None)
            for tree in trees:
                tree.watches.discard(change.watch)
            return
        for tree in tuple(trees):
            place = os.path.join(path, change.name) if change.name else path
            inside = place[len(tree.root) :].strip(os.sep).split(os.sep)
            # A pass depends on the names of records alone. A process that locks the run only writes into a file.
            if inside[0] != RECORDS_FOLDER or change.mask & _NAMES:
                tree.touched = True
            if change.mask & inotify.IS_FOLDER and tree.deep:
                self._follow(tree, place, change.mask)
            if _matters(inside, change.mask):
                yield tree.key

    def _follow(self, tree: _Tree, place: str, mask: int) -> None:
        """Watch a folder that came, before anybody looks at the tree, and no longer one that went."""
        if mask & (inotify.MOVED_FROM | inotify.DELETE):
            self._drop(tree, below=place)
        if mask & (inotify.CREATE | inotify.MOVED_TO):
            try:
                self._add(tree, place)
            except OSError:
                self._drop(tree)  # a later `watch` tries again, and says why it cannot
                tree.tried_at = float("-inf")


def _matters(parts: list[str], mask: int) -> bool:
    """True if a change of this path below a run, or of the run's folder (""), may be the trainer's."""
    if parts[0] == RECORDS_FOLDER:
        # We change our records ourselves. But a new manifest may be a trainer's seal on its save, and others open and
        # close incidents and silences, which somebody may be looking at.
        return len(parts) > 2 and parts[1] in ("manifests", "incidents", "silences") and parts[-1].endswith(".json")
    # The folder itself changes when our records do.
    return parts[0] != "" or bool(mask & (inotify.DELETE_SELF | inotify.MOVE_SELF))


def _folders(top: str) -> Iterator[str]:
    """Yield a folder and those below it, links not followed. What lies in one is looked at after it was yielded."""
    left = [top]
    while left:
        yield (folder := left.pop())
        try:
            with os.scandir(folder) as entries:
                left += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue


def _is_own_disk(path: str) -> bool:
    """True if the file system at a path is one of this machine alone, and no other one is mounted below."""
    real = os.path.realpath(path)
    if any(is_below(where, real) and where != real for where, _ in mounts()):
        return False
    return mount_of(real)[1] in _OWN_DISKS
