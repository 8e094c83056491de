"""What each kind of store does, by its protocols' names. This table alone knows the names; all else asks for traits.

A protocol that has no row is a file system that nothing is known of: every trait has the careful value.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

import msgspec

LOCAL = ("file", "local")  # these are paths of this machine


class StoreTraits(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of store. What only a trial can tell is no trait: see `Storage.capabilities`."""

    names: tuple[str, ...] = ()  # its protocols; of what a user configures for several of them, the last counts most
    extra: str | None = None  # of our package, which installs what opens it
    sessions: bool = False  # it is reached over a connection with state, which `sftp` looks after
    hosts: bool = True  # a URL's first part is a host or bucket; if not, it is the beginning of the path
    in_process: bool = False  # it is memory of this process: no answer gets lost, a lock makes puts exclusive
    multipart: Literal["parts", "blocks", "held", "joined", "moved"] = "moved"  # see `remote.multipart`
    lists_uploads: bool = False  # unfinished uploads stay, cost money, and are told of when asked for
    flat_listing: bool = False  # one request lists all that lies below a prefix, and says so when it fails
    etags: bool = False  # entries carry a tag of their content
    own_retries: bool = False  # its library tries again by itself, beside ours and its own library's
    mangled_names: str | None = None  # a pattern of names that it, or its library, would silently take for others

    def holds(self, name: str) -> bool:
        """True if an object or folder of this name can be stored under it."""
        return self.mangled_names is None or re.search(self.mangled_names, name) is None


UNKNOWN = StoreTraits()
_object_store = functools.partial(StoreTraits, flat_listing=True, etags=True)
_AZURE_MANGLES = r"[\x00-\x1f\x7f\\?]|^\s|\s$"
_STORES = (
    _object_store(names=("s3a", "s3"), extra="s3", multipart="parts", lists_uploads=True, own_retries=True),
    _object_store(names=("gcs", "gs"), extra="gcs", multipart="held"),
    _object_store(names=("az", "abfss", "abfs"), extra="azure", multipart="blocks", mangled_names=_AZURE_MANGLES),
    StoreTraits(names=("ssh", "sftp"), extra="sftp", sessions=True),
    StoreTraits(names=("memory",), hosts=False, in_process=True, multipart="joined"),
)
_BY_NAME = {name: store for store in _STORES for name in store.names}


def traits_of_url(url: str) -> StoreTraits:
    """The traits of what a URL leads to, before it is opened."""
    return _BY_NAME.get(url.partition(":")[0], UNKNOWN)


def traits_of(file_system: Any) -> StoreTraits:
    """The traits of an open file system of fsspec, whichever of its names it was opened by."""
    protocol = file_system.protocol
    names = (protocol,) if isinstance(protocol, str) else tuple(protocol)
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), UNKNOWN)
