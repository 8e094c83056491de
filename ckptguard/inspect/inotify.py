"""Whether a folder's file system tells of changes."""

from __future__ import annotations

import os
import threading

_SECONDS = 1.0


def events_arrive(folder: str) -> bool:
    """Whether a new file in this local folder is told within a second; leaves the file there."""
    from watchdog.events import FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer

    arrived = threading.Event()

    class _Told(FileSystemEventHandler):
        def on_any_event(self, event: FileSystemEvent) -> None:
            arrived.set()

    observer = Observer()
    try:
        observer.schedule(_Told(), folder)
        observer.start()
    except OSError:  # no watches left
        return False
    try:
        with open(os.path.join(folder, "watched"), "wb"):
            pass
        return arrived.wait(_SECONDS)
    finally:
        observer.stop()
        observer.join()
