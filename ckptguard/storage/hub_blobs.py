"""A Hugging Face hub cache as a `Storage`: its snapshots' links are read as the blobs that they name.

::

    models--org--name/snapshots/<commit>/<path> -> ../../blobs/<hash>     a file of a snapshot
    models--org--name/blobs/<hash>                                        its bytes
    models--org--name/blobs/<hash> -> ../../blobs/<xx>/<xet hash>         or a link to bytes shared by repositories
"""

from __future__ import annotations

import re

import msgspec

from ckptguard.errors import DeniedError, ObjectMissingError
from ckptguard.storage.local import folders as folders
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.storage.protocol import Enter, Entry

REPOSITORY = re.compile(r"(?:models|datasets|spaces|kernels)--[^/]+")
SNAPSHOTS, BLOBS, REFS = "snapshots", "blobs", "refs"
_BLOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHARED = re.compile(r"\.\./\.\./(blobs/(?P<start>[0-9a-f]{2})/(?P=start)[0-9a-f]{62})")
_SHARED_MARK = "blobs/.huggingface-shared-blobs"  # without it the hub's folder `blobs` may be anything


def blob_of(key: str, target: str | None) -> str | None:
    """Return the key of the blob that a snapshot's link names; None for a link to anywhere else."""
    parts = key.split("/")
    if len(parts) < 4 or not REPOSITORY.fullmatch(parts[0]) or parts[1] != SNAPSHOTS or target is None:
        return None
    way = "../" * (len(parts) - 2) + BLOBS + "/"
    name = target.removeprefix(way)
    if not target.startswith(way) or not _BLOB_NAME.fullmatch(name):
        return None
    return f"{parts[0]}/{BLOBS}/{name}"


class HubCacheStorage(LocalStorage):
    """The folder that holds ``models--*``. A snapshot's link to a blob of its own repository counts as a file.

    It is listed, described and opened as that regular file, with the link's own key; `target` is the link's text. All
    other links stay links and are not followed. Every step uses descriptors from the root, so replacing a folder or a
    blob by a link has no effect. `root` is None, because another process would see links at that path.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.root = None

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Enter | None = None, unread: bool = False
    ) -> list[Entry]:
        found = super().list(prefix, recursive=recursive, enter=enter, unread=unread)
        return [self._seen(entry) for entry in found]

    def stat(self, key: str) -> Entry:
        return self._seen(super().stat(key))

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        return super().copy(source, target, how="clone" if how == "link" else how)  # a link to a link is not a copy

    def why_unread(self, link: Entry) -> str | None:
        """Return why a listed link is not read as a file; None if only its blob is missing."""
        blob = blob_of(link.key, link.target)
        if blob is None:
            return "a link that does not lead to a blob of its own repository"
        try:
            found = super().stat(blob)
            if found.kind == "link":
                shared = self._shared(found)
                if shared is None:
                    return "a link to a blob that is itself a link"
                super().stat(shared)
        except ObjectMissingError:
            return None
        except DeniedError:
            if super().stat(blob.rpartition("/")[0]).kind != "link":
                raise
            return "a link into a folder of blobs that is itself a link"
        return "a link to what is not a regular file"

    def _open_file(self, folder: int, name: str, key: str) -> tuple[int, Entry]:
        link = folders.entry_at(folder, name, key)
        place = self._place_of(link)
        if place is None:
            return super()._open_file(folder, name, key)
        with folders.place_of(self.url, place) as (blobs, blob):
            descriptor, entry = super()._open_file(blobs, blob, key)
        return descriptor, msgspec.structs.replace(entry, target=link.target)

    def _seen(self, entry: Entry) -> Entry:
        """Return a link to bytes as a file, and anything else as it is."""
        try:
            place = self._place_of(entry)
            found = super().stat(place) if place is not None else entry
        except (ObjectMissingError, DeniedError):
            return entry
        return msgspec.structs.replace(found, key=entry.key, target=entry.target) if found.kind == "file" else entry

    def _place_of(self, entry: Entry) -> str | None:
        """Return the key of the bytes that a link means; None if it is not a snapshot's link to a blob."""
        blob = blob_of(entry.key, entry.target) if entry.kind == "link" else None
        if blob is None:
            return None
        found = super().stat(blob)
        return self._shared(found) if found.kind == "link" else blob

    def _shared(self, blob: Entry) -> str | None:
        """Return the key of the shared bytes that a blob links to, if the hub has such a store."""
        match = _SHARED.fullmatch(blob.target or "")
        try:
            marked = match is not None and super().stat(_SHARED_MARK).kind == "file"
        except (ObjectMissingError, DeniedError):
            return None
        return match[1] if match is not None and marked else None
