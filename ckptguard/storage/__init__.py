"""Bytes at keys: `open_storage` opens a local path or any fsspec URL with one contract (`protocol.py`)."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ckptguard.errors import NotFoundError, ObjectMissingError, SettingsError
from ckptguard.storage.local.held_names import split_root
from ckptguard.storage.protocol import Capabilities, Entry, Reader, Storage, Upload
from ckptguard.storage.redaction import refuse_secrets
from ckptguard.values.ids import escape
from ckptguard.values.storage_options import NO_OPTIONS, StorageOptions

if TYPE_CHECKING:
    from ckptguard.storage.retries import Retries

__all__ = ["Capabilities", "Entry", "Reader", "Storage", "Upload", "folder_must_exist", "normalise_url", "open_storage"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")


def normalise_url(url: str | os.PathLike[str]) -> str:
    """Return one spelling for each place: an absolute path (links not resolved), or a URL without a trailing slash."""
    text = os.fspath(url)
    if not text:  # it would mean the current folder
        raise SettingsError("a path or URL is empty", hint="check the variable that it comes from")
    if "\0" in text:
        raise SettingsError(f"{escape(text[:80])} is no path or URL: it holds a NUL")
    scheme, mark, rest = text.partition("://")
    try:
        local = None if _SCHEME.match(text) else os.path.expanduser(text)
        if local is None:
            from ckptguard.storage.traits import LOCAL, traits_of_url  # of URLs alone

            local = rest if mark and scheme in LOCAL else None
        if local is not None:
            root, below = split_root(os.path.abspath(local))
            return "/".join((root, *below))  # names in the records without their disguise
    except FileNotFoundError as error:  # for a relative path
        raise NotFoundError("the current folder no longer exists", hint="change to a folder that exists") from error
    refuse_secrets(text)
    if "::" not in text and not traits_of_url(text).hosts:
        return f"{scheme}://{rest.strip('/')}"  # one slash more or less means the same place
    return text.rstrip("/")


def open_storage(
    url: str | os.PathLike[str],
    *,
    must_exist: bool = True,
    retries: Retries | None = None,
    options: StorageOptions = NO_OPTIONS,
) -> Storage:
    """Open the storage at a local path, a ``file://`` URL or any other fsspec URL.

    `retries` and `options` (keys, endpoints) are for the latter, and for this storage alone. Opening reads nothing else
    and writes nothing.

    Raises:
        NotFoundError: `must_exist` is set and there is no folder.
        SettingsError: nothing here can open the URL.
    """
    place = normalise_url(url)
    storage = _opened(place, retries, options)
    if must_exist:
        folder_must_exist(storage, place)
    return storage


def folder_must_exist(storage: Storage, place: str) -> None:
    """Raise NotFoundError if there is no folder at the root of a storage, which was opened at this place."""
    try:
        found = storage.stat("").kind
    except ObjectMissingError as error:
        if storage.root is None:  # a bucket that is not there looks the same as one without such objects
            message = error.message if error.hint else f"there is nothing at {escape(place)}"
            raise NotFoundError(message, hint=error.hint or "check the URL") from error
        raise NotFoundError(f"there is no folder {escape(place)}", hint="check the path") from error
    if found != "folder":
        raise NotFoundError(f"{escape(place)} is not a folder", hint="name the folder that contains it")


def _opened(place: str, retries: Retries | None, options: StorageOptions) -> Storage:
    if _SCHEME.match(place):
        from ckptguard.storage.opening import open_remote
        from ckptguard.storage.retries import Retries, RetryingStorage

        retries = retries if retries is not None else Retries()
        return RetryingStorage(open_remote(place, retries, options), retries)
    from ckptguard.storage.local.local_storage import LocalStorage

    return LocalStorage(place)
