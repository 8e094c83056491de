"""The traits of each kind of store, by its protocols' names. Only this table knows the names.

A protocol without a row is an unknown file system: every trait has the careful value.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

import msgspec

LOCAL = ("file", "local")  # these are paths of this machine


class StoreTraits(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of store. What only a trial can show is in `Storage.capabilities`."""

    names: tuple[str, ...] = ()  # its protocols; if a user configures several of them, the last one wins
    extra: str | None = None  # the extra of our package that installs its library
    sessions: bool = False  # it has connections with state, which `sftp` manages
    hosts: bool = True  # a URL's first part is a host or bucket; if False, it is part of the path
    in_process: bool = False  # memory of this process: no answer gets lost, and a lock makes puts exclusive
    multipart: Literal["parts", "blocks", "held", "joined", "moved"] = "moved"  # see `remote.multipart`
    lists_uploads: bool = False  # unfinished uploads stay, cost money, and can be listed
    flat_listing: bool = False  # one request lists everything below a prefix, and reports its failure
    etags: bool = False  # entries have a tag of their content
    conditional_reads: bool = False  # a read or a copy may name the tag of what it means (by s3fs' `call_s3`)
    lists_by_prefix: bool = False  # its library lists what begins with a text, by one kind of request
    own_retries: bool = False  # its library retries, too, beside ours and its own library's
    mangled_names: str | None = None  # a pattern of names that it, or its library, would silently change

    def holds(self, name: str) -> bool:
        """True if the store can hold an object or folder of this name."""
        return self.mangled_names is None or re.search(self.mangled_names, name) is None


UNKNOWN = StoreTraits()
_object_store = functools.partial(StoreTraits, flat_listing=True, etags=True)
_AZURE_MANGLES = r"[\x00-\x1f\x7f\\?]|^\s|\s$"
_STORES = (
    _object_store(
        names=("s3a", "s3"),
        extra="s3",
        multipart="parts",
        lists_uploads=True,
        conditional_reads=True,
        lists_by_prefix=True,
        own_retries=True,
    ),
    _object_store(names=("gcs", "gs"), extra="gcs", multipart="held"),
    _object_store(names=("az", "abfss", "abfs"), extra="azure", multipart="blocks", mangled_names=_AZURE_MANGLES),
    StoreTraits(names=("ssh", "sftp"), extra="sftp", sessions=True),
    StoreTraits(names=("memory",), hosts=False, in_process=True, multipart="joined"),
)
_BY_NAME = {name: store for store in _STORES for name in store.names}


def traits_of_url(url: str) -> StoreTraits:
    """Return the traits of a URL before it is opened."""
    return _BY_NAME.get(url.partition(":")[0], UNKNOWN)


def traits_of(file_system: Any) -> StoreTraits:
    """Return the traits of an open fsspec file system, whichever of its names was used."""
    protocol = file_system.protocol
    names = (protocol,) if isinstance(protocol, str) else tuple(protocol)
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), UNKNOWN)
