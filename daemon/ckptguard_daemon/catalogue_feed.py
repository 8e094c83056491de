"""What each pass tells the catalogue. It asks no storage about an unchanged run, and never fails."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.catalogue.look import RunLook, digest_of
from ckptguard.catalogue.observe import observe
from ckptguard.catalogue.questions import known as known_of
from ckptguard.catalogue.questions import summaries
from ckptguard.catalogue.rows import Event, Known, event_key
from ckptguard.decisions.run_summary import in_state
from ckptguard.engine.watched_run import Passed, WatchedRun
from ckptguard.errors import CkptguardError, NotFoundError
from ckptguard.records.run import record_names
from ckptguard.replicas.replicate import Replica, furthest_behind
from ckptguard.runs.run_view import RunView
from ckptguard.runs.trainer_log import find_logs
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.upkeep.samples import Start
from ckptguard.values.ids import CheckpointId, escape, short_digest
from ckptguard.values.run_rows import FilesInPlace, WaitingSave
from ckptguard.values.run_summary import RunSummary
from ckptguard_daemon.log import log


@dataclass
class _OfRun:
    """What the feed remembers of one run."""

    summary: RunSummary
    start: Start | None = None  # what the last pass that was noted started from
    replicas: tuple[Replica, ...] = ()
    troubled: bool = False
    digest: bytes = b""  # of what was noted then
    was_gone: bool = False  # its records may be others now, of the same names
    failed: bool = False  # the last note was


def open_catalogue(socket_path: str, environ: Mapping[str, str]) -> Catalogue | None:
    """Open the catalogue of the daemon at this socket, in this user's private folder. None if there is no such
    folder."""
    name = short_digest(socket_path)
    try:
        folder = private_runtime_folder(environ)
    except OSError as error:
        log("catalogue", level="warning", reason=f"there is no folder for the catalogue: {error}")
        return None
    path = os.path.join(folder, f"{name}.catalogue")
    catalogue = Catalogue(path, lambda reason: log("catalogue", level="warning", reason=reason))
    catalogue.start()
    return catalogue


class CatalogueFeed:
    """Notes runs in a catalogue, and remembers the summary of each. Any thread may call it."""

    def __init__(self, catalogue: Catalogue | None = None) -> None:
        self.catalogue = Catalogue() if catalogue is None else catalogue
        self._runs = {id: _OfRun(known) for id, known in (self.catalogue.ask(summaries) or {}).items()}
        self._listeners: list[Callable[[], None]] = []
        self.catalogue.after_write = self.wake
        self.ask = self.catalogue.ask

    def note(self, view: RunView, passed: Passed) -> None:
        """Note what a pass over a run has seen. Never raises."""
        known = self._of(view.run.run_id)
        try:
            self._note(view, passed, known)
            known.failed = False
        except NotFoundError:
            known.start = None  # the next pass says that the run is gone
        except Exception as error:
            known.start = None  # the next pass tries again
            if not known.failed:
                known.failed = True
                told = isinstance(error, CkptguardError)
                reason = error.message if isinstance(error, CkptguardError) else type(error).__name__
                log("not_catalogued", level="warning", trace=not told, run=view.run.url, reason=reason)

    def listen(self, wake: Callable[[], None]) -> None:
        """Have a function called whenever there may be new events, from any thread. It must not raise."""
        self._listeners.append(wake)

    def wake(self) -> None:
        """Call those who listen."""
        for wake in self._listeners:
            wake()

    def holds(self, run_id: str) -> bool:
        """True if something is noted of a run."""
        return bool(self.catalogue.digest(run_id))

    def gone(self, run_id: str) -> None:
        """Believe nothing that is noted of a run when it is there again."""
        self._of(run_id).was_gone = True

    def keep_only(self, run_ids: Iterable[str]) -> None:
        """Forget all other runs. Call it when all guarded runs are known, and whenever one may have gone."""
        wanted = frozenset(run_ids)
        for run_id in [id for id in list(self._runs) if id not in wanted]:
            self._runs.pop(run_id, None)
        self.catalogue.keep_only(wanted)

    def summary(self, watched: WatchedRun) -> RunSummary:
        """Return the summary of a guarded run as of now."""
        known = msgspec.structs.replace(self._of(watched.run_id).summary, url=watched.url, name=watched.name)
        trouble = None if watched.trouble is None else watched.trouble.message
        ended = watched.ended_words if watched.state == "ended" else None
        return in_state(known, time.time(), watched.state, trouble, ended)

    def _of(self, run_id: str) -> _OfRun:
        return self._runs.setdefault(run_id, _OfRun(RunSummary(url="", name="")))

    def _note(self, view: RunView, passed: Passed, known: _OfRun) -> None:
        run, start = view.run, passed.notes.start
        if start is None:
            return
        before, held = known.start, self.catalogue.digest(run.run_id)
        anew = passed.wrote or known.was_gone or (before is not None and known.troubled != passed.troubled)
        same = before is not None and (before, before.beside, known.replicas) == (start, start.beside, passed.replicas)
        if same and held and held == known.digest and not anew:
            return
        names = frozenset(record_names(run, "")) if passed.wrote else start.names | start.beside
        look = _look_of(view, passed, start, names)
        digest = digest_of(look)
        if anew or digest != held:
            digest = self._see(view, look, known)
        if before is not None:
            self._tell_of_replicas(run.run_id, known.replicas, passed.replicas)
        known.start, known.replicas, known.troubled, known.digest = start, passed.replicas, passed.troubled, digest

    def _see(self, view: RunView, look: RunLook, known: _OfRun) -> bytes:
        run = view.run
        rows = self.ask(known_of, run.run_id) or Known()
        seen = observe(run, look, now=time.time(), known=Known(actions=rows.actions) if known.was_gone else rows)
        if os.path.isabs(run.url) and not os.path.isdir(run.url):
            # It went while it was looked at: the rows of nothing must not replace what is known.
            raise NotFoundError(f"{run.url} went meanwhile")
        known.summary, known.was_gone = seen.summary, False
        self.catalogue.see(seen)
        return seen.digest

    def _tell_of_replicas(self, run_id: str, before: Sequence[Replica], after: Sequence[Replica]) -> None:
        troubles, now = {replica.url: replica.trouble for replica in before}, time.time()
        for replica in after:
            if troubles.get(replica.url) != replica.trouble and (replica.url in troubles or replica.trouble):
                cause, text = ("trouble", escape(replica.trouble)) if replica.trouble else ("recovered", "")
                key = event_key("replica", replica.url, repr(now))
                event = Event(key=key, kind="replica", at=now, about=escape(replica.url), cause=cause, text=text)
                self.catalogue.happened(run_id, event)


def _look_of(view: RunView, passed: Passed, start: Start, names: frozenset[str]) -> RunLook:
    places: dict[CheckpointId, FilesInPlace] = {}
    waiting: list[WaitingSave] = []
    unread = start.listing.not_understood
    for path, checkpoint in start.listing.checkpoints.items():
        sample = passed.notes.samples.get(path)
        if sample is None or (sample.done and sample.id is None):
            continue
        written = checkpoint.written_at / 1e9 if checkpoint.written_at else None
        if sample.id is not None:
            places[sample.id] = FilesInPlace(checkpoint.bytes, written)
            continue
        since = time.time() - (time.monotonic() - sample.since)
        waiting.append(WaitingSave(checkpoint.series, checkpoint.bytes, written, since))
    return RunLook(
        url=view.run.url,
        names=names,
        places=places,
        waiting=tuple(waiting),
        replicas=len(view.settings.replicas),
        behind=furthest_behind(passed.replicas),
        replicated=Counter(id for replica in passed.replicas for id in replica.held),
        scrub_interval=passed.scrub_interval,
        keep=view.settings.keep,
        logs=find_logs(start.listing.entries),
        not_understood=0 if unread is None else unread.files,
    )
