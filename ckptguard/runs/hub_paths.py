"""Find what a path in a Hugging Face hub cache means, and what the cache says about a snapshot."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from ckptguard.errors import NotFoundError
from ckptguard.formats import tensor_suffix
from ckptguard.layouts import Checkpoint
from ckptguard.layouts.hub_snapshot import LAYOUT, HubFacts, stated_by_name
from ckptguard.layouts.single_file import LAYOUT as SINGLE_FILE
from ckptguard.storage.hub_blobs import BLOBS, REFS, REPOSITORY, SNAPSHOTS, HubCacheStorage, blob_of
from ckptguard.storage.protocol import Entry, find_entry, is_plain
from ckptguard.values.ids import escape

_MOST_HOPS = 40
_LONGEST_REF = 200  # bytes; a commit has 40
_MOST_REFS = 1000
_UNFINISHED = ".incomplete"


class HubPlace(msgspec.Struct, frozen=True):
    """A place in a hub cache. "" is the hub itself, any other path begins with a repository."""

    storage: HubCacheStorage
    path: str


def find_hub_place(path: str) -> HubPlace | None:
    """Return the place of a local path in a hub cache, or None. Links into the cache are followed, links in a snapshot
    not."""
    for _ in range(_MOST_HOPS):
        folder, name = os.path.split(path)
        real_folder = os.path.realpath(folder)
        place = _in_repository(path) or _in_repository(os.path.join(real_folder, name))
        if place is not None or not os.path.islink(path):
            break
        path = os.path.normpath(os.path.join(real_folder, os.readlink(path)))
    return place or _whole_hub(os.path.realpath(path))


def hub_checkpoints(place: HubPlace) -> list[Checkpoint]:
    """Return the snapshots at or below a place. Raises NotFoundError if there are none."""
    storage, parts = place.storage, place.path.split("/")
    if not place.path:
        names = [e.name for e in storage.list() if e.kind == "folder" and REPOSITORY.fullmatch(e.name)]
        return [c for name in names for c in _of_repository(storage, name)]
    found: list[Checkpoint] = []
    if len(parts) == 3 and parts[1] == BLOBS:
        found = [_of_blob(storage, place.path)]
    elif len(parts) > 2 and parts[1] == SNAPSHOTS:
        found = [hub_checkpoint(storage, place.path)]
    elif _is_repository(storage, parts[0]):
        found = _of_repository(storage, parts[0])
    if not found:
        raise NotFoundError(f"nothing was downloaded into {escape(place.path)}")
    return found


def linked_repositories(place: HubPlace) -> list[str]:
    """Return names in a hub that look like repositories but are links. ckptguard does not follow them."""
    if place.path:
        return []
    return [e.name for e in place.storage.list() if e.kind == "link" and REPOSITORY.fullmatch(e.name)]


def hub_checkpoint(storage: HubCacheStorage, path: str) -> Checkpoint:
    """Return a snapshot, or one folder or file of it, as storage lists it now. Raises NotFoundError."""
    entry = storage.stat(path)
    entries = storage.list(path, recursive=True) if entry.kind == "folder" else [entry]
    return Checkpoint(
        path=path,
        layout=LAYOUT.name if entry.kind == "folder" else SINGLE_FILE.name,
        series=path.partition("/")[0],
        step=None,
        entries=tuple(e for e in entries if e.kind == "file"),
        irregular=tuple(e for e in entries if e.kind not in ("file", "folder")),
    )


def hub_facts(storage: HubCacheStorage, checkpoint: Checkpoint) -> HubFacts:
    """Return what the names of blobs, links and refs say about a snapshot or one of its files."""
    sums = {}
    for entry in checkpoint.entries:
        own = entry.key if entry.key.split("/")[1:2] == [BLOBS] else ""
        stated = stated_by_name(blob_of(entry.key, entry.target) or own)
        if stated is not None:
            sums[entry.key] = stated
    why = {e.key: storage.why_unread(e) if e.kind == "link" else "not a regular file" for e in checkpoint.irregular}
    missing = tuple(key for key, reason in why.items() if reason is None)
    refused = {key: reason for key, reason in why.items() if reason is not None}
    if checkpoint.layout == SINGLE_FILE.name:
        unfinished = tuple(key for key in checkpoint.files if key.endswith(_UNFINISHED))
        return HubFacts(sums=sums, missing=missing, refused=refused, unfinished=unfinished)
    repository = checkpoint.path.partition("/")[0]
    snapshots = {e.name for e in _below(storage, f"{repository}/{SNAPSHOTS}") if e.kind == "folder"}
    refs = dict(_refs(storage, repository))
    # Nothing says which snapshot a download was for. The one that a ref names, or the only one, is likely.
    commit = checkpoint.path.split("/")[2] if "/" in checkpoint.path else ""
    concerned = commit in refs.values() or len(snapshots) < 2 or not set(refs.values()) & snapshots
    unfinished = tuple(_unfinished(storage, repository)) if concerned else ()
    lost = {ref: named for ref, named in refs.items() if named not in snapshots}
    return HubFacts(sums=sums, missing=missing, refused=refused, unfinished=unfinished, lost_refs=lost)


def _in_repository(path: str) -> HubPlace | None:
    parts = path.split("/")
    for number in reversed(range(1, len(parts))):
        if not REPOSITORY.fullmatch(parts[number]) or not all(map(is_plain, parts[number:])):
            continue
        here = "/".join(parts[: number + 1])
        if os.path.islink(here):
            return _in_repository("/".join([os.path.realpath(here), *parts[number + 1 :]]))
        storage = HubCacheStorage(os.path.realpath(os.path.dirname(here)))
        if os.path.isdir(here) and _is_repository(storage, parts[number]):
            return HubPlace(storage=storage, path="/".join(parts[number:]))
    return None


def _whole_hub(path: str) -> HubPlace | None:
    """Return a folder that holds repositories and nothing that could belong to a run, else None."""
    if not os.path.isdir(path):
        return None
    try:
        if not any(map(REPOSITORY.fullmatch, os.listdir(path))):
            return None  # listing names is cheap: most folders are no hubs, and some are large
    except OSError:
        pass  # the storage raises a better error below
    storage = HubCacheStorage(path)
    entries = [e for e in storage.list() if not e.name.startswith(".") and is_plain(e.name)]
    repositories = [e.name for e in entries if REPOSITORY.fullmatch(e.name)]
    others = [e for e in entries if e.name not in repositories and e.name != BLOBS]
    if any(e.kind == "folder" or tensor_suffix(e.name) for e in others):
        return None
    if not any(_is_repository(storage, e.name) for e in entries if e.name in repositories and e.kind == "folder"):
        return None
    return HubPlace(storage=storage, path="")


def _is_repository(storage: HubCacheStorage, name: str) -> bool:
    return any(e.kind == "folder" and e.name in (SNAPSHOTS, BLOBS, REFS) for e in storage.list(name))


def _of_repository(storage: HubCacheStorage, repository: str) -> list[Checkpoint]:
    snapshots = [e.key for e in _below(storage, f"{repository}/{SNAPSHOTS}") if e.kind == "folder"]
    if snapshots:
        return [hub_checkpoint(storage, key) for key in snapshots]
    if not _below(storage, f"{repository}/{BLOBS}"):
        return []  # a program queried the hub for it, and downloaded nothing
    return [Checkpoint(path=repository, layout=LAYOUT.name, series=repository, step=None, entries=())]


def _of_blob(storage: HubCacheStorage, blob: str) -> Checkpoint:
    """Return a blob under its name in a snapshot, because the name shows the format; else under its own name."""
    snapshots = f"{blob.partition('/')[0]}/{SNAPSHOTS}"
    for entry in _below(storage, snapshots, recursive=True):
        if entry.kind == "file" and blob_of(entry.key, entry.target) == blob:
            return hub_checkpoint(storage, entry.key)
    return hub_checkpoint(storage, blob)


def _unfinished(storage: HubCacheStorage, repository: str) -> Iterator[str]:
    """Yield downloads that did not finish, and whose blob no other download completed."""
    blobs = [e for e in _below(storage, f"{repository}/{BLOBS}") if e.kind == "file"]
    whole = {e.name for e in blobs}
    yield from (e.key for e in blobs if e.name.endswith(_UNFINISHED) and e.name.partition(".")[0] not in whole)


def _refs(storage: HubCacheStorage, repository: str) -> Iterator[tuple[str, str]]:
    """Yield each ref's key and the commit that it names."""
    refs = [e for e in _below(storage, f"{repository}/{REFS}", recursive=True) if e.kind == "file"]
    for entry in refs[:_MOST_REFS]:
        if entry.size <= _LONGEST_REF and not entry.name.startswith("."):
            with storage.open(entry.key) as reader:
                yield entry.key, reader.read(0, reader.entry.size).decode("utf-8", "replace").strip()


def _below(storage: HubCacheStorage, folder: str, *, recursive: bool = False) -> list[Entry]:
    """List a folder's entries; empty if it is absent or a link."""
    found = find_entry(storage, folder)
    return storage.list(folder, recursive=recursive) if found is not None and found.kind == "folder" else []
