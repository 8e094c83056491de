"""A Dask cluster as an engine: how many threads its workers have now, and whether its scheduler is lost."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import time
from collections.abc import Callable
from typing import Any

from ckptguard.errors import SettingsError, WorkerError
from ckptguard.values.ids import escape

_CONNECT = 5.0  # seconds
_ANSWER = 5.0  # for the scheduler to answer
_ALONE = 60.0  # seconds without any worker, after which the work is given up
_TALKATIVE = ("asyncio", "distributed", "tornado")


class DaskCluster:
    """The workers of a Dask client. `where` says which scheduler it is, in errors."""

    def __init__(self, client: Any, where: str = "") -> None:
        # What these log of a lost scheduler, at length, is said in one sentence by us.
        for called in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _TALKATIVE]:
            logging.getLogger(called).setLevel(logging.CRITICAL)
        self._client = client
        self._executor = client.get_executor(pure=False, retries=0)  # pure: what is tried again was done already
        self._scheduler = f"the Dask scheduler {where}"
        self._seen = time.monotonic()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Have `fn(*args)` called by a worker."""
        return self._executor.submit(fn, *args)

    def shutdown(self, wait: bool = False) -> None:
        """Cancel what has not begun."""
        self._executor.shutdown(wait=wait)

    def threads(self) -> int:
        """Return how many threads the workers have. WorkerError if the scheduler is lost, or had no worker for a
        while."""
        lost = f"{self._scheduler}cannot be reached"
        if self._client.status != "running":
            raise WorkerError(lost)
        try:
            # Not client.nthreads(): it would wait for half a minute for a scheduler that has just gone.
            threads = sum(self._client.sync(self._client.scheduler.ncores, callback_timeout=_ANSWER).values())
        except Exception as error:
            raise WorkerError(lost) from error
        now = time.monotonic()
        if threads:
            self._seen = now
        elif now - self._seen > _ALONE:
            raise WorkerError(f"{self._scheduler}has had no worker for {_ALONE:.0f} seconds")
        return int(threads)


def cluster_of(made: Any) -> DaskCluster | None:
    """Return the cluster of a Dask client, or of an executor of one. None for anything else."""
    client = getattr(made, "_client", made)
    return DaskCluster(client) if type(client).__module__.partition(".")[0] == "distributed" else None


def connect(place: str, stack: contextlib.ExitStack) -> DaskCluster:
    """Connect to the scheduler at HOST:PORT until the stack ends. Raises SettingsError or WorkerError."""
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(f"dask://{escape(place)} names no host and port", hint="write dask://HOST:PORT")
    try:
        import dask
        import distributed
    except ImportError as error:
        raise SettingsError("this engine needs Dask", hint='pip install "ckptguard[dask]"') from error
    secure = bool(dask.config.get("distributed.comm.tls.client.cert", None))
    if not secure and not _is_here(host):
        raise SettingsError(
            f"dask://{escape(place)} is on another machine, and has no TLS: anyone there could run code",
            hint="configure distributed.comm.tls of Dask, or return a client of your own from MODULE:FACTORY",
        )
    try:
        make: Any = distributed.Client
        client = make(f"{'tls' if secure else 'tcp'}://{place}", timeout=_CONNECT, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise WorkerError(f"the Dask scheduler at {escape(place)} cannot be reached") from error
    stack.callback(client.close, timeout=2)
    return DaskCluster(client, f"at {escape(place)} ")


def _is_here(host: str) -> bool:
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
