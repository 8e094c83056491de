"""Open a URL: choose its library and its options."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ckptguard.errors import SettingsError
from ckptguard.storage.failures import storage_error
from ckptguard.storage.protocol import Storage
from ckptguard.storage.redaction import keep_out, redacted, secrets_in
from ckptguard.storage.remote.remote_storage import RemoteStorage
from ckptguard.storage.retries import Retries
from ckptguard.storage.traits import traits_of, traits_of_url
from ckptguard.values.ids import escape
from ckptguard.values.storage_options import NO_OPTIONS, StorageOptions

T = TypeVar("T")

_LOGIN_SECONDS = 20  # asyncssh would wait two minutes for a host that accepts connections and then sends nothing
_BUSY, _ATTEMPTS = {429, 500, 502, 503, 504}, 5  # the answers that botocore asks for again, and how often
# Cached listings and shared instances gave wrong answers about existence, in both directions.
_ALWAYS: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}


_shared: dict[object, tuple[Any, dict[str, Any]]] = {}
_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


def open_remote(url: str, retries: Retries | None = None, options: StorageOptions = NO_OPTIONS) -> Storage:
    """Return the storage for an fsspec URL. Raises SettingsError if no installed file system opens it."""
    if traits_of_url(url).sessions:
        from ckptguard.storage.sftp.sftp_storage import SftpStorage

        return SftpStorage(url, functools.partial(_connect_sftp, url, options))
    return RemoteStorage(url, functools.partial(_connect, url, options), retries)


def import_library(url: str) -> None:
    """Import what opens a URL, which takes seconds on a busy machine, for those who then look at the clock. If it is
    missing, opening says so."""
    import fsspec

    name = url.partition(":")[0]
    with contextlib.suppress(Exception):
        importlib.import_module("sshfs") if traits_of_url(url).sessions else fsspec.get_filesystem_class(name)


def _connect(url: str, given: StorageOptions) -> tuple[Any, str]:
    import fsspec

    options = _options_for(url, given)
    make: Callable[[], tuple[Any, str]] = functools.partial(fsspec.core.url_to_fs, url, **_ALWAYS, **options)
    if "::" in url:
        return _opened(url, make)
    try:
        root = fsspec.get_filesystem_class(url.partition(":")[0])._strip_protocol(url)
    except (ImportError, ValueError) as error:
        raise _cannot_open(url, error) from error
    return _one_of_its_kind(url, options, lambda: _tried_once(make()[0])), root


def _options_for(url: str, given: StorageOptions) -> dict[str, Any]:
    """Return the options for a URL. From now on, messages never contain their secrets."""
    options = given.for_url(url)
    keep_out(secrets_in(options))
    return options


def _tried_once(file_system: Any) -> Any:
    """Turn off s3fs's own five attempts, which times botocore's and ours would take minutes. botocore's own stay, but
    begin with short waits, unless the user says how it retries."""
    if traits_of(file_system).own_retries:
        file_system.retries = 1
        if "retries" not in file_system.config_kwargs:
            hooks = importlib.import_module("aiobotocore.hooks")
            emitter = file_system.kwargs.setdefault("event_hooks", hooks.AioHierarchicalEmitter())
            emitter.register_first("needs-retry.s3", _short_wait)
    return file_system


def _short_wait(attempts: int, response: Any = None, **_: Any) -> float | None:
    """Return the seconds until botocore asks a busy store again. Its own waits are ten times as long. Where 40 of 100
    answers are "slow down", a run of a few checkpoints would take minutes."""
    status = None if response is None else getattr(response[0], "status_code", None)
    if status not in _BUSY or attempts >= _ATTEMPTS:
        return None
    return 0.05 * 2.0 ** (attempts - 1) * (1 - random.random() / 2)


def _connect_sftp(url: str, given: StorageOptions, fresh: bool = False) -> tuple[Any, str]:
    # By its class: fsspec's own file system of this name cannot write exclusively.
    try:
        import fsspec
        from sshfs import SSHFileSystem
    except ImportError as error:
        raise _cannot_open(url, error) from error
    configured = (fsspec.config.conf.get(name, {}) for name in traits_of_url(url).names)
    options: dict[str, Any] = {
        "known_hosts": (),  # the user's; sshfs would trust any host
        "sftp_client_kwargs": {"path_errors": "surrogateescape"},
        "login_timeout": _LOGIN_SECONDS,
        **functools.reduce(operator.or_, configured, {}),
        **_options_for(url, given),
        **SSHFileSystem._get_kwargs_from_urls(_place_in(url)),
    }
    make = functools.partial(SSHFileSystem, skip_instance_cache=True, **options)
    return _one_of_its_kind(url, options, make, fresh=fresh), "/" + url.partition("://")[2].partition("/")[2]


def _one_of_its_kind(url: str, options: dict[str, Any], make: Callable[[], Any], *, fresh: bool = False) -> Any:
    """Return the shared file system of this host and these options: connecting is slow, and ours cache no listings."""
    key = (os.getpid(), _place_in(url), _same(options))
    with _lock:
        if fresh:
            _shared.pop(key, None)
        if key not in _shared:
            _shared[key] = _opened(url, make), options  # which are kept, so that no id in the key is reused
        return _shared[key][0]


def _same(options: object) -> object:
    """Return a key that is equal only for equal options, so that users never share a connection.

    Objects that are not plain data are equal only to themselves, because their text may hide a secret.
    """
    if isinstance(options, dict):
        return tuple((name, _same(options[name])) for name in sorted(options, key=str))
    if isinstance(options, list | tuple):
        return tuple(map(_same, options))
    return repr(options) if isinstance(options, str | bytes | int | float | None) else ("object", id(options))


def _opened(url: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except (ImportError, ValueError, TypeError) as error:
        raise _cannot_open(url, error) from error
    except Exception as error:
        raise storage_error(error, "", url) from error


def _place_in(url: str) -> str:
    """Return protocol, user, host and port. Not by urlsplit: "#" and "?" are parts of names here."""
    return "/".join(url.split("/", 3)[:3])


def _cannot_open(url: str, error: Exception) -> SettingsError:
    extra = traits_of_url(url).extra
    return SettingsError(
        f"cannot open {escape(redacted(url))}: {escape(redacted(str(error)))}",
        hint=f'pip install "ckptguard[{extra}]"'
        if extra and isinstance(error, ImportError)
        else "use a path or a URL that fsspec knows, with options that its file system accepts",
    )
