"""Hints that something changed. Missing hints only cause delay: the loop also checks on a timer, and only the storage
counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from ckptguard.values.ids import RECORDS_FOLDER
from ckptguard_daemon.log import log

# We ourselves open and close files without writing while we verify.
_CHANGES = frozenset({"created", "modified", "moved", "deleted", "closed"})


class Watcher(FileSystemEventHandler):
    """Calls `wake` when something changes in one local folder, except our own records."""

    def __init__(self, root: str, wake: Callable[[], None]) -> None:
        self._root, self._wake = root, wake
        self._observer: BaseObserver | None = None
        self._inode: int | None = None
        self._complained = False

    def keep_watching(self) -> None:
        """Start watching if the folder exists and is not watched, or was replaced. Never raises."""
        try:
            inode = os.stat(self._root).st_ino
        except OSError:
            self.close()
            return
        if self._is_alive() and inode == self._inode:
            return
        self.close()
        try:
            observer = Observer()
            observer.schedule(self, self._root, recursive=True)
            observer.daemon = True
            observer.start()
        except Exception as error:  # out of inotify watches, an unusual file system, ...
            if not self._complained:
                log("watching_by_timer_only", level="warning", folder=self._root, reason=str(error))
            self._complained = True
            return
        self._observer, self._inode, self._complained = observer, inode, False

    def _is_alive(self) -> bool:
        # A dead thread of the observer would give no hints.
        observer = self._observer
        return observer is not None and observer.is_alive() and all(e.is_alive() for e in observer.emitters)

    def close(self) -> None:
        """Stop watching."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.stop()
            if threading.current_thread() is not observer and observer.is_alive():
                observer.join(timeout=1.0)

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Called by the observer's thread."""
        if event.event_type in _CHANGES and any(map(self._matters, (event.src_path, event.dest_path))):
            self._wake()

    def _matters(self, path: bytes | str) -> bool:
        if not path:
            return False
        inside = os.path.relpath(os.fsdecode(path), self._root).split(os.sep)
        if inside[0] == RECORDS_FOLDER:
            # We change our records ourselves, but a new manifest may be a trainer's seal on its save.
            return len(inside) > 2 and inside[1] == "manifests" and inside[-1].endswith(".json")
        return inside[0] != "."  # the folder itself is "modified" when our records are
