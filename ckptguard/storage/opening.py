"""From a URL to an open file system: which library opens it, with which options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptguard.errors import SettingsError, StorageError
from ckptguard.names import escape
from ckptguard.storage.failures import storage_error
from ckptguard.storage.options import known_secrets, options_for
from ckptguard.storage.protocol import Storage
from ckptguard.storage.redaction import redacted
from ckptguard.storage.remote import RemoteStorage
from ckptguard.storage.retries import Retries

_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "azure"),
    **dict.fromkeys(("sftp", "ssh"), "sftp"),
}
# Cached listings and shared instances gave wrong answers about existence, in both directions.
_ALWAYS: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}


def open_remote(url: str, retries: Retries | None = None) -> Storage:
    """The storage behind an fsspec URL; SettingsError when no installed file system opens it."""
    protocol = url.partition(":")[0]
    if protocol in ("sftp", "ssh"):
        from ckptguard.storage.sftp import SftpStorage

        return SftpStorage(url, _sftp_connector(url))
    return RemoteStorage(url, _connector(url), retries)


def _connector(url: str) -> Callable[[], tuple[Any, str]]:
    def connect() -> tuple[Any, str]:
        import fsspec

        try:
            file_system, root = fsspec.core.url_to_fs(url, **_ALWAYS, **options_for(url))
        except (ImportError, ValueError, TypeError) as error:
            raise _cannot_open(url, error) from error
        except (SettingsError, StorageError):
            raise
        except Exception as error:
            raise storage_error(error, "", url) from error
        return file_system, root

    return connect


def _sftp_connector(url: str) -> Callable[[], tuple[Any, str]]:
    def connect() -> tuple[Any, str]:
        # By its class: fsspec's own file system of this name cannot write exclusively.
        try:
            import fsspec
            from sshfs import SSHFileSystem
        except ImportError as error:
            raise _cannot_open(url, error) from error
        options: dict[str, Any] = {
            "known_hosts": (),  # the user's; sshfs would trust any host
            "sftp_client_kwargs": {"path_errors": "surrogateescape"},
            **fsspec.config.conf.get("ssh", {}),
            **fsspec.config.conf.get("sftp", {}),
            **options_for(url),
            **SSHFileSystem._get_kwargs_from_urls(url),
        }
        try:
            return SSHFileSystem(skip_instance_cache=True, **options), _path_in(url)
        except (ValueError, TypeError) as error:
            raise _cannot_open(url, error) from error
        except Exception as error:
            raise storage_error(error, "", url) from error

    return connect


def _path_in(url: str) -> str:
    # Not urlsplit: "#" and "?" are parts of names here.
    return "/" + url.partition("://")[2].partition("/")[2]


def _cannot_open(url: str, error: Exception) -> SettingsError:
    extra = _EXTRAS.get(url.partition(":")[0])
    return SettingsError(
        f"cannot open {escape(redacted(url))}: {escape(redacted(str(error), known_secrets()))}",
        hint=f'pip install "ckptguard[{extra}]"'
        if extra and isinstance(error, ImportError)
        else "use a path or a URL that fsspec knows, with options that its file system takes",
    )
