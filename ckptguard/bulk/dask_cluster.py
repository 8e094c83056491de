"""A Dask cluster as an engine: how many threads its workers have now, and whether its scheduler is lost."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptguard.errors import SettingsError, WorkerError
from ckptguard.values.ids import escape

_CONNECT = 5.0  # seconds
_ANSWER = 5.0  # for the scheduler to answer
_LONGEST_KEY = 1 << 20  # bytes of a file
_ALONE = 60.0  # seconds without any worker, after which the work is given up
_HINT = "see distributed.comm.tls in the configuration of Dask, on both sides"
_TALKATIVE = ("asyncio", "distributed", "tornado")


class DaskCluster:
    """The workers of a Dask client. `where` says which scheduler it is, in errors."""

    def __init__(self, client: Any, where: str = "") -> None:
        # What these log of a lost scheduler, at length, is said in one sentence by us.
        for called in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _TALKATIVE]:
            logging.getLogger(called).setLevel(logging.CRITICAL)
        self._client = client
        self._scheduler = f"the Dask scheduler {where}"
        self._seen = time.monotonic()

    def submit(self, fn: Callable[..., Any], /, *args: Any, workers: Sequence[str] = ()) -> Any:
        """Have `fn(*args)` called by one of these workers, or by any."""
        # pure: what is tried again was done already. If these workers have gone, any other one refuses, or does it.
        where = {"workers": list(workers), "allow_other_workers": True} if workers else {}
        return self._client.submit(fn, *args, pure=False, retries=0, **where)

    def threads(self) -> dict[str, int]:
        """Return how many threads each worker has, by its address. WorkerError if the scheduler is lost, or had no
        worker for a while."""
        lost = f"{self._scheduler}cannot be reached"
        if self._client.status != "running":
            raise WorkerError(lost)
        try:
            # Not client.nthreads(): it would wait for half a minute for a scheduler that has just gone.
            threads = self._client.sync(self._client.scheduler.ncores, callback_timeout=_ANSWER)
        except Exception as error:
            raise WorkerError(lost) from error
        now = time.monotonic()
        if threads:
            self._seen = now
        elif now - self._seen > _ALONE:
            raise WorkerError(f"{self._scheduler}has had no worker for {_ALONE:.0f} seconds")
        return dict(threads)


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
    tls = dask.config.get("distributed.comm.tls", {})
    secure = bool((tls.get("client") or {}).get("cert"))
    if secure:
        _check_files(tls)
    elif not _is_here(host):
        raise SettingsError(
            f"dask://{escape(place)} is on another machine, and has no TLS: anyone there could run code",
            hint="configure distributed.comm.tls of Dask, or return a client of your own from MODULE:FACTORY",
        )
    try:
        make: Any = distributed.Client
        client = make(f"{'tls' if secure else 'tcp'}://{place}", timeout=_CONNECT, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise WorkerError(f"the Dask scheduler at {escape(place)} {_why_not(error)}", hint=_HINT) from error
    stack.callback(client.close, timeout=2)
    return DaskCluster(client, f"at {escape(place)} ")


def _check_files(tls: Mapping[str, Any]) -> None:
    """Raise SettingsError that names what is of no use in `distributed.comm.tls` of Dask."""
    import distributed

    files = [tls.get("ca-file"), *((tls.get("client") or {}).get(kind) for kind in ("cert", "key"))]
    if not files[0]:
        raise SettingsError("Dask has a certificate for TLS and no ca-file", hint=_HINT)
    for file in files:
        if file and "\n" not in file:  # Dask takes the text itself, too
            try:
                with open(file, "rb") as opened:
                    text = opened.read(_LONGEST_KEY)
            except OSError as error:
                raise SettingsError(f"{escape(file)} cannot be read: {error.strerror}", hint=_HINT) from error
            if b"ENCRYPTED" in text:  # OpenSSL would ask the terminal, and wait
                raise SettingsError(f"{escape(file)} has a password, and Dask knows none", hint=_HINT)
    security: Any = distributed.Security
    try:
        security().get_connection_args("client")
    except (ssl.SSLError, ValueError) as error:
        named = ", ".join(escape(str(file)[:200]) for file in files)
        raise SettingsError(f"Dask cannot use these files for TLS: {named}: {error}", hint=_HINT) from error


def _why_not(error: BaseException) -> str:
    """Say why Dask cannot use a scheduler: which side refuses the other, if one does."""
    cause = error.__cause__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"has a certificate that our CA file does not accept: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError) or "SSLError" in str(error):
        return f"refuses our certificate, or speaks no TLS: {escape(str(error))}"
    return f"cannot be reached: {escape(str(cause))}"


def _is_here(host: str) -> bool:
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
