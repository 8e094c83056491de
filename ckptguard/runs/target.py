"""Find out what a user's TARGET is: a file, a checkpoint, or a run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence

import msgspec

from ckptguard.errors import NotFoundError, ObjectMissingError, StorageError
from ckptguard.layouts import Checkpoint, enter, find_checkpoints, folder_as_checkpoint, plain_folder, single_file
from ckptguard.layouts.hub_snapshot import HUB_RECORDS
from ckptguard.layouts.plain_folder import is_loose
from ckptguard.layouts.step_names import step_from_name
from ckptguard.records.run import has_records
from ckptguard.runs.hub_paths import HubPlace, find_hub_place, hub_checkpoints, linked_repositories
from ckptguard.runs.run_view import RunView, open_view
from ckptguard.storage import Entry, Storage, normalise_url, open_storage
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import RECORDS_FOLDER, escape, numbers_of, series_of
from ckptguard.values.patterns import Pattern
from ckptguard.values.record_formats import FORMAT_KEY
from ckptguard.values.settings import Settings

_MOST_FOLDERS_UP = 8  # in which a checkpoint's run is looked for
_MOST_NAMED = 3  # runs in a folder that is none
_MOST_BESIDE = 8  # other saves of a run, to compare one with


class Target(msgspec.Struct, frozen=True):
    """A resolved TARGET.

    A single file or checkpoint has a `storage` at its parent folder, and a `checkpoint` with keys relative to it. A
    run, or a checkpoint inside a run with records, has a `view`. A hub cache, a repository of it, or a folder of
    downloads has kind "run" without `view`. Its checkpoints are `snapshots`. `unread` names links that look like
    repositories. Reported paths are relative to the key `prefix`.
    """

    url: str
    kind: str  # "file" | "checkpoint" | "run"
    storage: Storage
    checkpoint: Checkpoint | None = None
    view: RunView | None = None
    snapshots: tuple[Checkpoint, ...] = ()
    prefix: str = ""
    unread: tuple[str, ...] = ()


def resolve_target(target: str, settings: Settings) -> Target:
    """Find out what a path or URL is. Raises NotFoundError if ckptguard cannot check it."""
    url = normalise_url(target)
    if "://" not in url:
        place = find_hub_place(url)
        if place is not None:
            return _in_hub(url, place)
        url = os.path.realpath(url)
    parent, _, name = url.rstrip("/").rpartition("/")
    if "://" in url and parent.endswith(":/") and name:
        return _whole_run(open_view(url, settings), url, target)
    if not name:
        raise NotFoundError(f"{target} is the root of a storage, not a run", hint="name a folder inside it")
    storage = open_storage(parent or "/", must_exist=False, options=settings.storage)
    try:
        entry = storage.stat(name)
    except ObjectMissingError as error:
        message = error.message if error.hint else f"there is nothing at {target}"
        raise NotFoundError(message, hint=error.hint) from error
    if entry.kind not in ("file", "folder"):
        raise NotFoundError(f"{target} is not a regular file or folder")
    if entry.kind == "file":
        layout, series, step = single_file.LAYOUT.name, series_of(name), step_from_name(name)
        lone = Checkpoint(path=name, layout=layout, series=series, step=step, entries=(entry,))
        return _inside_run(url, settings) or one_checkpoint(url, storage, lone)
    run_storage = open_storage(url, options=settings.storage)
    with_records = _has_records_in(run_storage)
    inside = None if with_records else _inside_run(url, settings)
    if inside is not None:
        return inside
    below = run_storage.list("", recursive=True, enter=enter, unread=True)
    if with_records or _holds_saves(name, below, settings.patterns):
        view = open_view(url, settings)
        view.take_listed(below)
        if not with_records and (found := _downloads(view)):
            return Target(url=url, kind="run", storage=run_storage, snapshots=found)
        _refuse_runs_below(view)
        return Target(url=url, kind="run", storage=run_storage, view=view)
    checkpoint = folder_as_checkpoint(name, _inside(name, below))
    if checkpoint is not None:
        return one_checkpoint(url, storage, checkpoint)
    view = open_view(url, settings)
    view.take_listed(below)
    if found := _downloads(view):
        return Target(url=url, kind="run", storage=run_storage, snapshots=found)
    return _whole_run(view, url, target)


def one_checkpoint(url: str, storage: Storage, checkpoint: Checkpoint, view: RunView | None = None) -> Target:
    """Return the target that is one checkpoint of a storage, or of the run with this view."""
    kind = "file" if checkpoint.layout == single_file.LAYOUT.name else "checkpoint"
    return Target(url=url, kind=kind, storage=storage, checkpoint=checkpoint, view=view, prefix=checkpoint.path)


def open_named_run(url: str, settings: Settings, *, must_exist: bool = True, may_hold_runs: bool = False) -> RunView:
    """Open the run that a user names. Without `must_exist` its folder may come later. With `may_hold_runs` it is a run
    although all its checkpoints have records in folders of it.

    A folder with records or with checkpoints in it is a run. So is an empty folder, and model files without a step.
    Raises NotFoundError with the run's name if it is a checkpoint of a run.
    """
    view = open_view(url, settings, must_exist=must_exist)
    run = view.run
    if has_records(run):
        return view
    try:
        below = view.entries
    except ObjectMissingError:
        if must_exist:
            raise
        return view
    if not may_hold_runs:
        _refuse_runs_below(view)
    place = run.url.rstrip("/")
    parent, _, name = place.rpartition("/")
    if not below or not parent.rstrip("/") or parent.endswith(":/") or _has_children(below, settings.patterns):
        return view
    inside = _inside_run(place, settings)
    if inside is not None and inside.view is not None:
        raise NotFoundError(f"{place} is a checkpoint, not a run; its run is {inside.view.run.url}")
    if _is_numbered(name, below):
        raise NotFoundError(f"{place} is a checkpoint, not a run; its run is the folder around it, {parent}")
    return view


def run_around(path: str) -> str | None:
    """Return the folder around a local file or numbered checkpoint, which is its run. None for what may be a run."""
    parent, _, name = path.rstrip("/").rpartition("/")
    if os.path.isfile(path):
        return parent or "/"
    if not os.path.isdir(path) or _has_records_in(storage := open_storage(path)):
        return None
    below = storage.list("", recursive=True, enter=enter, unread=True)
    return parent if parent and not _has_children(below, ()) and _is_numbered(name, below) else None


def several_checkpoints(target: Target, name: str) -> NotFoundError:
    """Return the error for a command that needs one checkpoint, but was given a run or a hub cache."""
    if target.view is None:
        return NotFoundError(
            f"{name} holds several downloads; name one of them", hint=f"ckptguard verify {shlex.quote(name)} lists them"
        )
    return NotFoundError(
        f"{name} is a run, not one checkpoint; name one of its checkpoints", hint=f"ckptguard list {shlex.quote(name)}"
    )


def _whole_run(view: RunView, url: str, target: str) -> Target:
    """Return a target that can only be a run. Raises NotFoundError if it is none."""
    if view.checkpoints or has_records(view.run):
        _refuse_runs_below(view)
        return Target(url=url, kind="run", storage=view.run.storage, view=view)
    unread = view.listing.not_understood
    found = next(iter(view.listing.unread_notes), None if unread is None else "; ".join(unread.notes))
    raise NotFoundError(f"there is no checkpoint in {target}", hint=found)


def _refuse_runs_below(view: RunView) -> None:
    """Raise NotFoundError if a local folder has no records, and runs in it have those of all its checkpoints: without
    them a guard's saves would count as incomplete."""
    root = view.run.storage.root
    if root is None or not view.checkpoints or has_records(view.run):
        return
    runs: set[str] = set()
    for path in (checkpoint.path for checkpoint in view.checkpoints):
        above = (path[:end] for end, letter in enumerate(path) if letter == "/")
        run = next((one for one in above if one in runs or _has_local_records(os.path.join(root, one))), None)
        if run is None:
            return
        runs.add(run)
    names = ", ".join(escape(one) for one in sorted(runs)[:_MOST_NAMED])
    more = f" and {len(runs) - _MOST_NAMED} more" if len(runs) > _MOST_NAMED else ""
    place = view.run.url.rstrip("/")
    raise NotFoundError(
        f"{place} is no run: its checkpoints belong to the runs {names}{more} in it",
        hint=f"ckptguard fleet verify {shlex.quote(place)} verifies all; ckptguard status {shlex.quote(place + '/*')}",
    )


def _has_local_records(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, RECORDS_FOLDER, FORMAT_KEY))


def _downloads(view: RunView) -> tuple[Checkpoint, ...]:
    """Return what is in a local folder if all of it was downloaded from the hub, and nothing was changed since: no
    training saved it. Else nothing: it may be a run, as one with a step or with records is."""
    folder, listing = view.run.url, view.listing
    if "://" in folder or listing.not_understood is not None or listing.unread or has_records(view.run):
        return ()
    found: list[Checkpoint] = []
    for one in view.checkpoints:
        own = [entry for entry in view.entries if entry.key.startswith(f"{one.path}/")]
        checkpoint = folder_as_checkpoint(one.path, own) if one.step is None else None
        if checkpoint is None or not all(_is_as_downloaded(folder, one.path, entry) for entry in checkpoint.entries):
            return ()
        found.append(checkpoint)
    return tuple(found)


def _is_as_downloaded(folder: str, path: str, entry: Entry) -> bool:
    """True if the hub's client noted a file after it was last written."""
    noted = os.path.join(folder, path, HUB_RECORDS, f"{entry.key.removeprefix(f'{path}/')}.metadata")
    try:
        return entry.mtime_ns is not None and os.stat(noted).st_mtime_ns >= entry.mtime_ns
    except OSError:
        return False


def _in_hub(url: str, place: HubPlace) -> Target:
    try:
        found = hub_checkpoints(place)
    except ObjectMissingError as error:
        raise NotFoundError(f"there is nothing at {escape(url)}") from error
    if len(found) == 1 and place.path.count("/") > 1:
        return one_checkpoint(url, place.storage, found[0])
    base = place.path.partition("/")[0]
    unread = tuple(linked_repositories(place))
    return Target(url=url, kind="run", storage=place.storage, snapshots=tuple(found), prefix=base, unread=unread)


def _has_records_in(storage: Storage) -> bool:
    try:
        return find_entry(storage, f"{RECORDS_FOLDER}/{FORMAT_KEY}") is not None
    except StorageError:
        return False


def saves_beside(target: Target, settings: Settings) -> Iterator[tuple[Storage, Checkpoint]]:
    """Yield other saves of the run without records that a file or checkpoint is in, with their storage: the nearest of
    its series first.

    A file may be part of a checkpoint: then the run is around that. A folder that is one checkpoint is no run, however
    many files it has.
    """
    path = target.url.rstrip("/")
    for place in (path, path.rpartition("/")[0]):
        root, _, name = place.rpartition("/")
        if not root or root.endswith(":/"):
            return
        storage = open_storage(root, must_exist=False, options=settings.storage)
        near = _entries_near(storage, name)
        if _holds_saves(root.rpartition("/")[2], near, settings.patterns):
            own = path.removeprefix(f"{root}/")
            others = (c for c in find_checkpoints(near, settings.patterns) if c.path != name and own not in c.files)
            nearest = sorted(others, key=lambda other: _distance(name, other.path))
            yield from ((storage, other) for other in nearest[:_MOST_BESIDE])
            return


def _entries_near(storage: Storage, name: str) -> list[Entry]:
    """List what lies beside a file or numbered folder: all files, and the nearest folders of its series. Other folders
    are not entered: they may hold everything that a user has."""
    beside = storage.list("")
    near = [e for e in beside if e.kind != "folder"]
    folders = [e.key for e in beside if e.kind == "folder" and series_of(e.key) == series_of(name)]
    if name in folders and step_from_name(name) is not None:
        for folder in sorted(folders, key=lambda other: _distance(name, other))[: _MOST_BESIDE + 1]:
            near += storage.list(folder, recursive=True, enter=enter, unread=True)
    return near


def _distance(name: str, other: str) -> tuple[bool, list[int], str]:
    """Sort the names of one series first, and of these the nearest by step."""
    steps = (numbers_of(step_from_name(one)) for one in (name, other))
    return series_of(name) != series_of(other), [abs(a - b) for a, b in zip(*steps, strict=False)], other


def _holds_saves(name: str, below: Sequence[Entry], patterns: tuple[Pattern, ...]) -> bool:
    """True if a folder is a run, not one checkpoint. A trainer's own checkpoint has its parts in it. A run may have a
    number in its name, and files of any kind."""
    found = find_checkpoints(_inside(name, below), patterns)
    alone = (
        [c.path for c in found] == [name] and found[0].step is not None and found[0].layout != plain_folder.LAYOUT.name
    )
    return not alone and _has_children(below, patterns)


def _inside(name: str, below: Sequence[Entry]) -> list[Entry]:
    """Return the entries of a folder with keys that begin with its name."""
    return [msgspec.structs.replace(e, key=f"{name}/{e.key}") for e in below]


def _has_children(below: Sequence[Entry], patterns: tuple[Pattern, ...]) -> bool:
    """Whether a folder holds checkpoints beside what may lie at its root."""
    children = find_checkpoints(below, patterns)
    lone = (c.layout == single_file.LAYOUT.name and c.step is None and not is_loose(c.path) for c in children)
    return any("/" in c.path or not alone for c, alone in zip(children, lone, strict=True) if c.path != ".")


def _inside_run(url: str, settings: Settings) -> Target | None:
    """Return the run with records that contains this path as a checkpoint."""
    parts = url.rstrip("/").split("/")
    for up in range(1, _MOST_FOLDERS_UP + 1):
        root = "/".join(parts[:-up])
        if not root or root.endswith(":/") or RECORDS_FOLDER in parts[:-up]:
            return None
        if not _has_records_in(open_storage(root, must_exist=False, options=settings.storage)):
            continue
        view = open_view(root, settings)
        run = view.run
        path = "/".join(parts[-up:])
        # A file of a checkpoint means the whole checkpoint: a single shard is neither good nor bad.
        found = view.holding(path)
        if found is not None:
            return one_checkpoint(run.usable(found.path), run.storage, found, view)
    return None


def _is_numbered(name: str, below: Sequence[Entry]) -> bool:
    """Whether a folder with these files is one checkpoint with a step."""
    found = folder_as_checkpoint(name, _inside(name, below))
    return found is not None and found.step is not None
