"""What does the tasks: anything with `submit(fn, *args) -> Future`, such as the executors of `concurrent.futures`.

`fn` is a function of a module, and the arguments are plain data. Of the future only `add_done_callback`, `result` and
`cancel` are used. Its `result` raises an error if the worker died.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import msgspec

from ckptguard.bulk.dask_cluster import DaskCluster, cluster_of, connect
from ckptguard.bulk.messages import SOFTWARE, Table, Task
from ckptguard.bulk.worker import begin, identify, perform
from ckptguard.errors import CkptguardError, SettingsError, WorkerError
from ckptguard.values.ids import escape

_TIMEOUT = 60.0  # seconds for the first worker to answer


class Engine:
    """What `make` returns does the tasks. It is made again if it breaks as a whole, as a pool of processes does when
    one of them dies.

    `workers` is how many tasks it does at once; Dask knows better. `is_here`: they are on this machine, and see what we
    see. `aside`: what was wrong with the workers that may not do some tasks, by their addresses.
    """

    def __init__(self, make: Callable[[], Any], workers: int, *, is_here: bool = False) -> None:
        self.workers, self.is_here = workers, is_here
        self.addresses: set[str] | None = None  # of all workers, where they can be chosen
        self.aside: dict[str, str] = {}
        self._make, self._made = make, make()
        self.check()
        self.look()

    def look(self) -> None:
        """Count the workers of a Dask cluster. Raises WorkerError if it is lost."""
        if isinstance(self._made, DaskCluster):
            threads = self._made.threads()
            self.workers, self.addresses = max(sum(threads.values()), 1), set(threads)

    def check(self) -> None:
        """Raise WorkerError if no worker answers."""
        answered = threading.Event()
        future = self._submit(identify)
        try:
            future.add_done_callback(lambda _: answered.set())
            said = dict(future.result()) if answered.wait(_TIMEOUT) else {}
        except Exception as error:
            reason = escape(str(error)) or type(error).__name__
            raise WorkerError(f"the engine's workers cannot work: {reason}") from error
        if not said:
            raise WorkerError(f"no worker of the engine answered within {_TIMEOUT:.0f} seconds")

    def submit(self, task: Task, avoid: Collection[str] = (), options: Table | None = None) -> Future[Table]:
        """Give a task to the engine; not to these workers, if they can be chosen. Workers on this machine get the
        storage `options`. Raises WorkerError if it takes no work."""
        table = {**msgspec.to_builtins(task), "software": SOFTWARE}
        if options is not None:
            table["options"] = options
        chosen = sorted((self.addresses or set()) - set(avoid)) if avoid else []
        return self._submit(perform, table, workers=chosen) if chosen else self._submit(perform, table)

    def has_other(self, avoid: Collection[str]) -> bool:
        """True if there is a worker that is none of these."""
        return len(avoid) < self.workers if self.addresses is None else not self.addresses <= set(avoid)

    def close(self, *, wait: bool) -> None:
        """End the engine. Where it does not `wait`, a task that has begun is done, which does no harm."""
        shutdown = getattr(self._made, "shutdown", None)
        if shutdown is not None:
            shutdown(wait=wait)

    def _submit(self, fn: Callable[..., Any], *args: Any, **where: Any) -> Future[Table]:
        try:
            try:
                found: Future[Table] = self._made.submit(fn, *args, **where)
            except BrokenExecutor:
                self._made = self._make()
                found = self._made.submit(fn, *args, **where)
        except CkptguardError:
            raise
        except Exception as error:  # an engine of the user's own may raise anything
            raise WorkerError(f"the engine takes no work: {type(error).__name__}: {escape(str(error))}") from error
        return found


def other_software(theirs: Mapping[str, str]) -> str:
    """Say how the software that a worker states differs from ours; "" if it states none."""
    differs = [f"{name} {theirs.get(name)}, not {ours}" for name, ours in SOFTWARE.items() if theirs.get(name) != ours]
    return f"has other software: {escape(', '.join(differs))}" if theirs else ""


@contextlib.contextmanager
def open_engine(name: str, workers: int) -> Iterator[Engine]:
    """Yield the engine of this name: "threads", "processes", "dask://HOST:PORT" or "MODULE:FACTORY".

    `workers` counts threads or processes. Raises SettingsError for another name, and WorkerError if no worker can be
    used.
    """
    with contextlib.ExitStack() as stack:
        if name in ("threads", "processes"):
            make, stop = _threads(workers) if name == "threads" else _processes(workers)
            stack.callback(begin, None)  # it is this process that has threads
            engine = Engine(make, workers, is_here=True)
            stack.callback(engine.close, wait=True)
            stack.callback(stop.set)
        else:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # what a library prints is no result of ours
            is_dask = name.startswith("dask://")
            cluster = connect(name.removeprefix("dask://"), stack) if is_dask else None
            engine = Engine(_factory(name) if cluster is None else lambda: cluster, workers)
            stack.callback(engine.close, wait=False)
        yield engine


def _threads(workers: int) -> tuple[Callable[[], Any], threading.Event]:
    stop = threading.Event()
    begin(stop)
    return lambda: ThreadPoolExecutor(workers, "ckptguard-bulk"), stop


def _processes(workers: int) -> tuple[Callable[[], Any], Any]:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with _safe_path():
        stop = context.Event()
    return lambda: _Processes(workers, context, initializer=begin, initargs=(stop, os.getpid())), stop


class _Processes(ProcessPoolExecutor):
    """Its processes start when work is given to it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
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


def _factory(name: str) -> Callable[[], Any]:
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

    def make() -> Any:
        try:
            made = factory()
        except Exception as error:
            raise WorkerError(f"the engine {escape(name)} failed: {type(error).__name__}: {error}") from error
        if not callable(getattr(made, "submit", None)):
            raise SettingsError(f"{escape(name)} returned nothing that has submit(fn, *args)")
        return cluster_of(made) or made

    return make
