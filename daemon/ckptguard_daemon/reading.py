"""What a click reads: counted, and bounded in requests, time, size, memory, and clicks at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ckptguard.documents.build import Document
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import CouldNotTellError, NotFoundError, SettingsError
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.storage.protocol import Storage
from ckptguard.values.ids import CheckpointId, id_from_record
from ckptguard_daemon.http.replies import pack
from ckptguard_daemon.jobs import StorageThreads

MOST_SECONDS = 20.0  # until a click asks the storage nothing more
MOST_REQUESTS = 1000
_AT_ONCE, _OF_RUN = 8, 4  # clicks that read
LONGEST_NAME = 4000
_ASKS = frozenset(("list", "names", "stat", "open"))


class Reads:
    """Counts the requests of one click, and refuses more than its budget. Threads may share it."""

    def __init__(self, seconds: float = MOST_SECONDS) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._until = time.monotonic() + seconds

    def note(self) -> None:
        """Count one request. Raises CouldNotTellError once there were too many, or they take too long."""
        with self._lock:
            self.count += 1
        if time.monotonic() > self._until or self.count > MOST_REQUESTS:
            raise CouldNotTellError("the storage took too long to read all of it", hint="ask for less, or try again")


class _Counted:
    """A storage whose requests are counted. It is only read."""

    def __init__(self, storage: Storage, reads: Reads) -> None:
        self._storage, self._reads = storage, reads

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self._storage, verb)
        if verb not in _ASKS:
            return found

        def asked(*args: Any, **named: Any) -> Any:
            self._reads.note()
            return found(*args, **named)

        return asked


def counted_view(run: WatchedRun, reads: Reads) -> RunView:
    """Return a run as it is now, for one click. Raises NotFoundError."""
    opened = run.open()
    storage, records = (cast(Storage, _Counted(one, reads)) for one in (opened.storage, opened.records))
    return RunView(msgspec.structs.replace(opened, storage=storage, records=records), run.settings, run.memory)


class Clicks:
    """Does what clicks ask for in a few threads, so that a slow storage holds up nothing else."""

    def __init__(self) -> None:
        self._turns = StorageThreads(most=_AT_ONCE, of_run=_OF_RUN)

    async def answer(self, request: Request, make: Callable[[Reads], Document]) -> Response:
        """Return the document that `make` returns, with the number of its requests. Raises BusyError."""

        def made(reads: Reads) -> Response:
            answer = make(reads)
            answer.setdefault("reads", reads.count)
            return pack(request, answer)

        return await self.do(request, made)

    async def do(self, request: Request, make: Callable[[Reads], Response]) -> Response:
        """Return what `make` returns. Raises BusyError."""
        return await self._turns.do(request.path_params["run"], lambda: make(Reads()))


def id_of(request: Request, parameter: str = "name") -> CheckpointId:
    """Return the checkpoint that the query names, as the page's document does. Raises SettingsError."""
    name = request.query_params.get(parameter, "")
    if len(name) > LONGEST_NAME:
        raise SettingsError(f"`{parameter}` is too long")
    folder, _, rest = name.partition("/")
    id = id_from_record(folder, rest)
    if id is None or folder in ("", ".", "..") or id.record_path != name:
        raise SettingsError(f"`{parameter}` must be the name of a checkpoint", hint="GET .../page has the names")
    return id


def unknown(id: CheckpointId, run: Run) -> NotFoundError:
    """Return the error for a checkpoint that no record names."""
    return NotFoundError(f"no record of {run.url} is about {id.series} {id}")
