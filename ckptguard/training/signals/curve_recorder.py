"""Write the curve of a training as a record beside it. Training waits for nothing of this, and no failure reaches it.

Training only appends to a list. A thread thins and writes, at most every half minute, sooner after a save, and at the
end. What could not be written is written later. So a full or broken storage costs points of the curve at most.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable

from ckptguard.decisions.thinning import Thinned
from ckptguard.errors import CkptguardError, ObjectMissingError, RunRemovedError
from ckptguard.records.run import Run, has_content, list_records
from ckptguard.records.samples import (
    FOLDER,
    Samples,
    is_of,
    read_samples,
    remove_samples,
    samples_name,
    superseded,
    write_samples,
)
from ckptguard.records.who_and_when import dated_name
from ckptguard.values.curve import Row
from ckptguard.values.own_log import log as _log

_PAUSE = 30.0  # seconds between two writes
_AFTER_SAVE = 5.0  # the same, where a save came in between
_LONGEST_PAUSE = 600.0  # while it cannot be written
_END_SECONDS = 5.0  # that the end of a training waits at most
_MOST_FRESH = 8192  # updates that wait to be thinned
_Change = Row | Callable[[Thinned], None]
_open: weakref.WeakSet[CurveRecorder] = weakref.WeakSet()


class CurveRecorder:
    """Records the signals of one training. Without a run, as on ranks that do not lead, it records nothing.

    Nothing here raises.
    """

    def __init__(self, run: Run | None) -> None:
        self._token, self._process = dated_name()[0], os.getpid()
        self._run = run
        self._fresh: list[_Change] = []
        self._curve, self._lock = Thinned(), threading.Lock()
        self._unwritten = False
        self._thread: threading.Thread | None = None
        self._began_at, self._pause = time.monotonic(), _PAUSE
        self._due = self._began_at + _PAUSE
        self._number = 0
        self._written = ""  # the record that is there
        self._old: list[str] = []  # own records that must go
        self._took: list[str] | None = None  # records of others that were taken over; None: not yet
        self._replaced = False  # another guard has taken over this one's record
        _open.add(self)

    def append(self, row: Row) -> None:
        """Note an update."""
        self._note(row)
        if time.monotonic() >= self._due:
            self._write_beside()
        elif len(self._fresh) >= _MOST_FRESH:
            self._thin_beside()

    def begin(self, onset: Row | None = None) -> None:
        """Training goes back, or begins. `onset` is the update at which it turned sick."""
        if onset is not None:
            self._note(lambda curve: curve.keep(onset))
        self._note(Thinned.begin)
        self.saved()

    def skip(self, first: int, last: int) -> None:
        """The batches of these updates are left out from now on."""
        self._note(lambda curve: curve.skip(first, last))

    def saved(self) -> None:
        """A checkpoint was saved: write soon, too."""
        self._due = min(self._due, self._began_at + _AFTER_SAVE)

    def finish(self) -> None:
        """Training ends, or pauses: write what there is. Does not wait for it."""
        if self._fresh or self._unwritten:
            self._write_beside()

    def close(self, seconds: float = _END_SECONDS) -> None:
        """Write the rest, and wait for it, but not long."""
        end = time.monotonic() + seconds
        for _ in range(2):  # what is being written, and what came since
            self.finish()
            if self._thread is not None:
                self._thread.join(max(0.0, end - time.monotonic()))

    @property
    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _note(self, change: _Change) -> None:
        if self._run is not None:
            self._fresh.append(change)

    def _write_beside(self) -> None:
        self._began_at = time.monotonic()
        self._due = self._began_at + self._pause
        if not self._is_busy:
            self._start(self._write)

    def _thin_beside(self) -> None:
        if not self._is_busy:
            self._start(self._thin)
        elif self._lock.acquire(blocking=False):  # it waits for the storage
            self._lock.release()
            self._thin(self._take_fresh())

    def _start(self, work: Callable[[list[_Change]], None]) -> None:
        fresh = self._take_fresh()
        if self._process != os.getpid():
            return  # forked: the parent records
        thread = threading.Thread(target=work, args=(fresh,), name="ckptguard-samples", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # no more threads
            self._thin(fresh)

    def _take_fresh(self) -> list[_Change]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def _thin(self, fresh: list[_Change]) -> None:
        with self._lock:
            for change in fresh:
                if callable(change):
                    change(self._curve)
                else:
                    self._curve.add(change)
            self._unwritten = self._unwritten or bool(fresh)

    def _write(self, fresh: list[_Change]) -> None:
        run = self._run
        if run is None:
            return
        self._thin(fresh)
        if not self._curve.has_points:
            return
        try:
            if self._took is None:
                self._take_over(run)
            elif self._written and not has_content(run, f"{FOLDER}/{self._written}"):
                self._replaced = any(not is_of(name, self._token) for name in list_records(run, FOLDER))
            if not self._replaced:
                self._write_all(run)
            self._pause = _PAUSE
        except Exception as error:
            is_missing = isinstance(error, RunRemovedError | ObjectMissingError)  # the run is gone, or not begun
            if self._pause == _PAUSE and not is_missing:
                reason = error.message if isinstance(error, CkptguardError) else repr(error)
                _log.warning("the loss curve of %s cannot be recorded now: %s", run.url, reason)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._due = time.monotonic() + self._pause

    def _take_over(self, run: Run) -> None:
        """Continue the curve that earlier trainings of the run left."""
        names = list_records(run, FOLDER)
        earlier = read_samples(run, names)
        taken = {*earlier, *superseded(names), *(name for samples in earlier.values() for name in samples.took)}
        with self._lock:
            own, self._curve = self._curve.curve(), Thinned()
            for samples in earlier.values():
                self._curve.take(samples.curve)
            self._curve.take(own, ends=False)
            self._took = sorted(taken.intersection(names))

    def _write_all(self, run: Run) -> None:
        with self._lock:
            curve, self._unwritten = self._curve.curve(), False
        self._number += 1
        name, took = samples_name(self._token, self._number), self._took or []
        try:
            write_samples(run, name, Samples(curve=curve, took=tuple(took)))
        except BaseException:
            self._old.append(name)  # it may be there
            self._unwritten = True
            raise
        self._old += [self._written] if self._written else []
        self._written = name
        remove_samples(run, [*took, *self._old])
        self._took, self._old = [], []


@atexit.register
def _close_all() -> None:
    for recorder in list(_open):
        recorder.close()
