"""Show a checkpoint from the records under its own names: links outside the run, for loaders that open a path."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping

from ckptguard.storage.local.held_names import own_name
from ckptguard.storage.runtime_folder import private_runtime_folder, require_private
from ckptguard.values.ids import RECORDS_FOLDER

_ORIGIN = ".origin"  # a link to what is shown; it dangles once that is gone


def linked_view(path: str, environ: Mapping[str, str]) -> str:
    """Return a path where a loader finds a checkpoint under its trainer's names. A path outside the records stays as it
    is.

    Raises OSError if no folder for the links can be made.
    """
    if RECORDS_FOLDER not in path.split("/"):
        return path
    files = {"": path} if os.path.isfile(path) else dict(_below(path))
    said = "\0".join([path, *sorted(files)])
    with contextlib.suppress(OSError):
        return _linked(_cache(environ), said, path, files)
    return _linked(private_runtime_folder(environ), said, path, files)


def forget_views(environ: Mapping[str, str], *, dry_run: bool = False) -> int:
    """Remove the links of all runs of this user, which are made again when they are needed. Return how many folders of
    them there were. A folder that others can write is left alone."""
    found = 0
    for above in (_cache(environ), private_runtime_folder(environ)):
        with contextlib.suppress(OSError):
            require_private(above)
            for entry in list(os.scandir(above)):
                if entry.name.startswith(("view-", "new-")) and entry.is_dir(follow_symlinks=False):
                    found += 1
                    if not dry_run:
                        shutil.rmtree(entry.path, ignore_errors=True)
    if not dry_run:
        with contextlib.suppress(OSError):  # something else is in it
            os.rmdir(_cache(environ))
            os.rmdir(os.path.dirname(_cache(environ)))
    return found


def _cache(environ: Mapping[str, str]) -> str:
    above = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(above, "ckptguard", "known-good")


def _below(path: str) -> list[tuple[str, str]]:
    found = []
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            inside = os.path.relpath(file, path).split("/")
            if os.path.isfile(file) and not os.path.islink(file):
                found.append(("/".join(map(own_name, inside)), file))
    return found


def _linked(above: str, said: str, path: str, files: Mapping[str, str]) -> str:
    os.makedirs(above, mode=0o700, exist_ok=True)
    require_private(above)
    _forget_gone(above)
    place = os.path.join(above, "view-" + hashlib.sha256(os.fsencode(said)).hexdigest()[:16])
    name = own_name(path.rpartition("/")[2])
    links = {os.path.join(name, inside) if inside else name: file for inside, file in files.items()} | {_ORIGIN: path}
    if _links_in(place) != links:  # none yet, or a user of it wrote, added or removed something there
        new = tempfile.mkdtemp(dir=above, prefix="new-")
        for inside, file in links.items():
            link = os.path.join(new, inside)
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(file, link)
        shutil.rmtree(place, ignore_errors=True)
        try:
            os.rename(new, place)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return os.path.join(place, name)


def _links_in(place: str) -> dict[str, str | None]:
    """Map every link below a folder to its target; files map to None."""
    found: dict[str, str | None] = {}
    for folder, folders, names in os.walk(place):
        for entry in (os.path.join(folder, name) for name in (*folders, *names)):
            if os.path.islink(entry) or not os.path.isdir(entry):
                found[os.path.relpath(entry, place)] = os.readlink(entry) if os.path.islink(entry) else None
    return found


def _forget_gone(above: str) -> None:
    for entry in os.scandir(above):
        if entry.name.startswith("view-") and not os.path.exists(os.path.join(entry.path, _ORIGIN)):
            shutil.rmtree(entry.path, ignore_errors=True)
