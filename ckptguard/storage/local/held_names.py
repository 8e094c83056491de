"""How names are stored below `_ckptguard` on a local disk, so that no trainer's search finds a checkpoint there.

The names of a checkpoint (its series, folders and files) are stored as ``held.<name>.held``. So neither
``rglob("step-*/*.pth")`` nor a suffix matches. Keys and all folders above contain the plain names. Records of
format 1 have plain names, so each part of a key is looked up in both ways.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Sequence

from ckptguard.storage.local.syncs import sync
from ckptguard.values.ids import RECORDS_FOLDER
from ckptguard.values.record_formats import FORMAT_KEY
from ckptguard.values.temporary_names import REPAIR_OF_COPY

_HELD = re.compile(r"held\.(.+)\.held", re.DOTALL)
_LONGEST = 255  # bytes; a name that would be longer is stored plainly
_MOVED = frozenset({"kept", "quarantine", "trash"})  # <series>/<id>/<path>
_NAMED = _MOVED | {"manifests", "ledger", "scrubs", "metrics", "pins", "reference", "training", "trainings", "saving"}
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Deeper folders are listed as "other" and not entered: nobody saves there, and every level holds a descriptor.
DEEPEST = 64


def held_name(name: str) -> str:
    """Return the stored form of a name in the records."""
    held = f"held.{name}.held"
    return held if len(os.fsencode(held)) <= _LONGEST else name


def own_name(name: str) -> str:
    """Return the plain name for any stored form."""
    match = _HELD.fullmatch(name)
    return match[1] if match else name


def is_anothers(name: str) -> bool:
    """True if a name is the stored form of another one: it is itself never stored plainly."""
    return own_name(name) != name != held_name(name)


@functools.lru_cache(64)
def split_root(root: str) -> tuple[str, tuple[str, ...]]:
    """Split a local path into its records folder and the plain names below it. Without one, return the whole path."""
    parts = root.split("/")
    if RECORDS_FOLDER not in parts:
        return root, ()
    end = parts.index(RECORDS_FOLDER) + 1
    return "/".join(parts[:end]), tuple(map(own_name, parts[end:]))


def is_holding(root: str, parts: Sequence[str]) -> bool:
    """True if names directly in the folder `parts` below `root` are a checkpoint's own, in the records."""
    base, above = split_root(root)
    inside = [*above, *parts]
    if base.rpartition("/")[2] != RECORDS_FOLDER:
        if RECORDS_FOLDER not in inside:
            return False
        inside = inside[inside.index(RECORDS_FOLDER) + 1 :]
    if not inside:
        return False
    top = inside[0]
    if top in _NAMED:
        return len(inside) == 1 or (len(inside) > 2 and top in _MOVED)
    return top.startswith(REPAIR_OF_COPY.start)


def lying_as(folder: int, name: str, root: str, above: Sequence[str], *, make: bool = False) -> str:
    """Return the stored form of a name in an open folder, which is at `above` below `root`. With `make`, the form that
    it gets if it does not exist."""
    if not is_holding(root, above):
        return name
    spelled = held_name(name)
    if is_there(folder, spelled) or is_anothers(name):
        return spelled
    return name if is_there(folder, name) or (make and are_plain(root, above)) else spelled


def are_plain(root: str, parts: Sequence[str]) -> bool:
    """True if the records that contain `parts` have format 1: its readers find no names but plain ones."""
    base, above = split_root(root)
    inside = [*above, *parts]
    if base.rpartition("/")[2] != RECORDS_FOLDER:
        base = os.path.join(base, *inside[: inside.index(RECORDS_FOLDER) + 1])
    with contextlib.suppress(OSError, ValueError), open(os.path.join(base, FORMAT_KEY), "rb") as file:
        return bool(json.loads(file.read(_LONGEST)) == {"format": 1})
    return False


def lying_path(root: str, parts: Sequence[str]) -> str:
    """Return the stored path of a key's parts."""
    root, above = split_root(root)
    parts, place = [*above, *parts], root
    for depth, name in enumerate(parts):
        held, place = os.path.join(place, held_name(name)), os.path.join(place, name)
        bare = not is_anothers(name) and os.path.lexists(place) and not os.path.lexists(held)
        if is_holding(root, parts[:depth]) and not bare:
            place = held
    return place


def hold_names(folder: int, root: str, parts: Sequence[str]) -> None:
    """Rename everything below the open folder `parts` to its stored form.

    After a kill in between, every name is still found, and a second call continues. What cannot be renamed stays.
    """
    held = is_holding(root, parts) and not are_plain(root, parts)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in found:
            own = own_name(name)
            new = held_name(own) if held else own
            with contextlib.suppress(OSError):
                if new != name and not is_there(folder, new):
                    os.rename(name, new, src_dir_fd=folder, dst_dir_fd=folder)
                    name = new
                if is_folder and len(parts) < DEEPEST:
                    below = os.open(name, _LIST, dir_fd=folder)
                    try:
                        hold_names(below, root, [*parts, own])
                    finally:
                        os.close(below)
        sync(folder)


def is_there(folder: int, name: str) -> bool:
    """True if anything has this name in an open folder, also a dangling link."""
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True
