"""The engine that bulk work runs on: an `Executor` of threads, of processes, of Dask, or of the user's own."""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from ckptguard.bulk.messages import SOFTWARE, Table
from ckptguard.bulk.worker import Stop, begin, identify, perform
from ckptguard.errors import SettingsError, WorkerError
from ckptguard.values.ids import escape

_PATIENCE = 60.0  # seconds for the first worker to answer
_CONNECT = 5.0
_ANSWER = 5.0  # for the scheduler to answer
_ALONE = 60.0  # seconds without any worker of a Dask cluster, after which its work is given up

_TALKATIVE = ("asyncio", "distributed", "tornado")

Held = Mapping[str, Mapping[str, Table]]


class Engine:
    """An executor that can be replaced when it breaks, and how many tasks it does at once.

    `make` returns the executor, and `count` how many tasks it does at once. It raises WorkerError if the engine is
    lost. `stop` ends the tasks of workers on this machine.
    """

    def __init__(
        self, make: Callable[[], Executor], count: Callable[[], int], stop: Callable[[], None] | None = None
    ) -> None:
        self._make = make
        self._count = count
        self._stop = stop
        self.workers = max(count(), 1)
        self._executor = make()
        self._probe()

    def look(self) -> None:
        """Count the workers again. Raises WorkerError if the engine is lost."""
        self.workers = max(self._count(), 1)

    def submit(self, task: Table) -> tuple[Executor, Future[Table]]:
        """Give a task to the engine. Raises WorkerError if that is impossible."""
        for _ in range(2):
            executor = self._executor
            try:
                return executor, executor.submit(perform, {**task, "software": SOFTWARE})
            except BrokenExecutor:
                self.renew(executor)
            except Exception as error:  # an engine of the user's own may raise anything
                raise WorkerError(f"the engine takes no work: {type(error).__name__}: {escape(str(error))}") from error
        raise WorkerError("the engine's workers die as soon as they start")

    def renew(self, broken: Executor) -> None:
        """Replace an executor that is broken as a whole, as a pool of processes is when one of them dies."""
        if broken is not self._executor:
            return
        broken.shutdown(wait=False)
        self._executor = self._make()
        self._probe()

    def _probe(self) -> None:
        """Compare the software of a worker with ours. WorkerError if it differs, or none answers."""
        try:
            compare(self._executor.submit(identify).result(timeout=_PATIENCE))
        except WorkerError:
            raise
        except TimeoutError as error:
            raise WorkerError(f"no worker of the engine answered within {_PATIENCE:.0f} seconds") from error
        except Exception as error:
            reason = escape(str(error)) or type(error).__name__
            raise WorkerError(f"the engine's workers cannot work: {reason}") from error

    def close(self) -> None:
        """End what is under way on this machine. Elsewhere a task that has begun is done, which does no harm."""
        if self._stop is not None:
            self._stop()
        self._executor.shutdown(wait=self._stop is not None)


def compare(said: Table) -> None:
    """Raise WorkerError if a worker has other software than we have."""
    theirs = said.get("software")
    if theirs == SOFTWARE:
        return
    differs = [
        f"{name} {theirs.get(name) if isinstance(theirs, dict) else 'unknown'}, not {ours}"
        for name, ours in SOFTWARE.items()
        if not isinstance(theirs, dict) or theirs.get(name) != ours
    ]
    raise WorkerError(
        f"the worker {said.get('host')} has other software: {', '.join(differs)}",
        hint="install the same version there",
    )


@contextlib.contextmanager
def open_engine(name: str, workers: int, held: Held) -> Iterator[Engine]:
    """Yield the engine of this name: "threads", "processes", "dask://HOST:PORT" or "MODULE:FACTORY".

    `workers` counts threads or processes. `held` are the storage options by run, for workers on this machine. Others
    hold their own. Raises SettingsError for another name, and WorkerError if no worker can be used.
    """
    with contextlib.ExitStack() as stack:
        if name == "threads":
            stop = threading.Event()
            begin(stop, held)
            stack.callback(begin, threading.Event(), {})  # it is this process that works
            engine = Engine(lambda: ThreadPoolExecutor(workers, "ckptguard-bulk"), lambda: workers, stop.set)
        elif name == "processes":
            engine = _of_processes(workers, held)
        elif name.startswith("dask://"):
            engine = _of_dask(name.removeprefix("dask://"), stack)
        else:
            engine = _of_factory(name, workers)
        stack.callback(engine.close)
        yield engine


def _of_processes(workers: int, held: Held) -> Engine:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with _safe_path():
        stop = context.Event()
    start: tuple[Stop, Held, int] = (stop, held, os.getpid())
    return Engine(lambda: _Processes(workers, context, initializer=begin, initargs=start), lambda: workers, stop.set)


class _Processes(ProcessPoolExecutor):
    """Its processes start when work is given to it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with _safe_path():
            return super().submit(fn, *args, **kwargs)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Python processes that start now import nothing from the current folder, which may be a downloaded run."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _of_factory(name: str, workers: int) -> Engine:
    make = _factory(name)
    made = [make()]
    if type(made[0]).__module__.partition(".")[0] == "distributed":  # Dask knows its workers, and if it is lost
        return _of_client(getattr(made[0], "_client"), lambda: made[0])  # noqa: B009 - no type says that it is there
    return Engine(lambda: made.pop() if made else make(), lambda: workers)


def _factory(name: str) -> Callable[[], Executor]:
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise SettingsError(
            f"there is no engine {escape(name)!r}",
            hint="use threads, processes, dask://HOST:PORT, or MODULE:FACTORY of your own",
        )
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"the engine {escape(name)} cannot be loaded: {escape(str(error))}") from error

    def make() -> Executor:
        try:
            executor = factory()
        except Exception as error:
            raise WorkerError(f"the engine {escape(name)} failed: {type(error).__name__}: {error}") from error
        if not callable(getattr(executor, "submit", None)):
            raise SettingsError(f"{escape(name)} returned no concurrent.futures.Executor")
        return executor  # type: ignore[no-any-return]

    return make


def _of_dask(place: str, stack: contextlib.ExitStack) -> Engine:
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(f"dask://{escape(place)} names no host and port", hint="write dask://HOST:PORT")
    try:
        import dask
        import distributed
    except ImportError as error:
        raise SettingsError("this engine needs Dask", hint='pip install "ckptguard[dask]"') from error
    secure = bool(dask.config.get("distributed.comm.tls.client.cert", None))
    if not secure and not _is_here(place):
        raise SettingsError(
            f"dask://{escape(place)} is on another machine, and has no TLS: anyone there could run code",
            hint="configure distributed.comm.tls of Dask, or return an executor of your own from MODULE:FACTORY",
        )
    try:
        connect: Any = distributed.Client
        client = connect(f"{'tls' if secure else 'tcp'}://{place}", timeout=_CONNECT, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise WorkerError(f"the Dask scheduler at {escape(place)} cannot be reached") from error
    stack.callback(client.close, timeout=2)
    # pure: a task that is given again would be answered from memory
    return _of_client(client, lambda: client.get_executor(pure=False, retries=0), f"at {escape(place)} ")


def _of_client(client: Any, make: Callable[[], Executor], where: str = "") -> Engine:
    """Return the engine of a Dask client, after all workers were compared with us."""
    # What these log of a lost scheduler, at length, is said in one sentence by us.
    for called in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _TALKATIVE]:
        logging.getLogger(called).setLevel(logging.CRITICAL)
    said: dict[str, Any] = {}
    try:
        client.wait_for_workers(1, timeout=_PATIENCE)
        said = client.run(identify, on_error="return")
    except (OSError, TimeoutError) as error:
        raise WorkerError(f"no worker of the Dask scheduler {where}answered") from error
    for worker, answer in said.items():
        if isinstance(answer, BaseException):
            raise WorkerError(f"the worker {worker} cannot work: {escape(str(answer))}") from answer
        compare(answer)
    return Engine(make, _DaskThreads(client, f"the Dask scheduler {where}cannot be reached").count)


class _DaskThreads:
    """The threads of all workers that a scheduler has now."""

    def __init__(self, client: Any, lost: str) -> None:
        self._client = client
        self._lost = lost
        self._seen = time.monotonic()

    def count(self) -> int:
        """Return how many there are. WorkerError if the scheduler is lost, or has had no worker for a while."""
        if self._client.status != "running":
            raise WorkerError(self._lost)
        try:
            # Not client.nthreads(): it would wait for half a minute for a scheduler that has just gone.
            threads = sum(self._client.sync(self._client.scheduler.ncores, callback_timeout=_ANSWER).values())
        except Exception as error:
            raise WorkerError(self._lost) from error
        now = time.monotonic()
        if threads:
            self._seen = now
        elif now - self._seen > _ALONE:
            raise WorkerError(f"the Dask scheduler has had no worker for {_ALONE:.0f} seconds")
        return int(threads)


def _is_here(place: str) -> bool:
    host = place.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
