"""Checkpoints that a layout of another package finds: what it adds to those that ours found."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec

from ckptguard.formats import tensor_suffix
from ckptguard.formats.strict_json import printable
from ckptguard.layouts import Checkpoint, plain_folder, step_from_name
from ckptguard.plugins.call import CALL_SECONDS, PluginError, call_plugin
from ckptguard.plugins.installed import Plugin, find_plugin, format_plugin
from ckptguard.plugins.interface import FoundCheckpoint
from ckptguard.records.run import Run
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import is_safe_path, series_of

_MOST_REMEMBERED, _MOST_NAMES = 32, 500_000  # answers, and names that they are about, of all runs
_REST = 10.0  # a layout that failed rests for this many times as long as it took: a listing must not wait each time


class _Answer(msgspec.Struct, frozen=True):
    """What a layout said of this many names, or why it gave no answer, which holds until this time (monotonic)."""

    names: int = 0
    found: tuple[FoundCheckpoint, ...] = ()
    trouble: str = ""
    until: float = 0.0


_answers: dict[tuple[str, str], _Answer] = {}  # by layout, and by the digest of the names, or the run where it failed
_remembering = threading.Lock()


def with_plugin_layouts(run: Run, entries: Sequence[Entry], found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints of a listing, with what the layouts say that the run's settings name.

    Of a checkpoint that ours found, a layout only says what is missing. Others it makes of files that only plugins
    read. If it gives no answer, that is a doubt about every checkpoint of the run.
    """
    by_path = {c.path: c for c in found}
    said = [_asked(name, run, entries) for name in dict.fromkeys(run.layouts)]
    files = {e.key: e for e in entries if e.kind == "file" and not tensor_suffix(e.key)}
    ours = {c.path for c in found if not _is_by_plugin(c)}
    folders = {folder for path in ours for folder in _and_above(path)}
    missing: dict[str, list[str]] = {}
    for one in (one for _, _, answer in said for one in answer):
        is_free = one.path not in folders and ours.isdisjoint(_and_above(one.path))
        new = _new(one, files) if is_free and one.path not in by_path else None
        if new is not None:
            by_path[new.path] = new
            for file in new.files:
                by_path.pop(file, None)
            ours.add(new.path)
            folders.update(_and_above(new.path))
        if one.path in by_path:
            missing.setdefault(one.path, []).extend(map(printable, one.missing))
    notes = tuple((label, trouble) for label, trouble, _ in said)
    return [msgspec.structs.replace(c, asked=notes, missing=tuple(missing.get(c.path, ()))) for c in by_path.values()]


def _asked(name: str, run: Run, entries: Sequence[Entry]) -> tuple[str, str, tuple[FoundCheckpoint, ...]]:
    """Return the name and version of a layout, why it gave no answer, and its answer."""
    plugin = find_plugin("layouts", name)
    if plugin is None:
        return f"layouts/{name}", f"the layout {name} of the setting `layouts` is not installed", ()
    names = tuple(sorted(e.key for e in entries if e.kind == "file"))
    digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()
    known, failed = _answers.get((plugin.label, digest)), _answers.get((plugin.label, run.url))
    if known is None and failed is not None and time.monotonic() < failed.until:
        known = failed
    if known is None:
        known = _answer_of(plugin, names, run)
        _remember((plugin.label, run.url if known.trouble else digest), known)
    return plugin.label, known.trouble, known.found


def _answer_of(plugin: Plugin, names: tuple[str, ...], run: Run) -> _Answer:
    begun = time.monotonic()
    try:
        found = call_plugin(plugin, names, tuple[FoundCheckpoint, ...], memory=run.plugin_memory, seconds=CALL_SECONDS)
    except PluginError as error:
        now = time.monotonic()
        return _Answer(trouble=error.message, until=now + _REST * (now - begun))
    return _Answer(names=len(names), found=found)


def _remember(key: tuple[str, str], answer: _Answer) -> None:
    """Keep it, and forget the oldest ones."""
    with _remembering:
        _answers[key] = answer
        while len(_answers) > 1 and (
            len(_answers) > _MOST_REMEMBERED or sum(one.names for one in _answers.values()) > _MOST_NAMES
        ):
            del _answers[next(iter(_answers))]


def _new(one: FoundCheckpoint, files: Mapping[str, Entry]) -> Checkpoint | None:
    """Return a checkpoint of files that no format of ours knows; None if the layout claims others, or none that a
    plugin reads."""
    inside = all(file.startswith(f"{one.path}/") and file in files for file in one.files)
    if not inside or not is_safe_path(one.path) or not any(format_plugin(file) is not None for file in one.files):
        return None
    return Checkpoint(
        path=one.path,
        layout=plain_folder.LAYOUT.name,
        series=series_of(one.path),
        step=step_from_name(one.path.rpartition("/")[2]),
        entries=tuple(files[file] for file in sorted(set(one.files))),
        claimed=True,
    )


def _is_by_plugin(checkpoint: Checkpoint) -> bool:
    """True for a single file that only a plugin reads: it may be a part of what a layout finds."""
    path = checkpoint.path
    return checkpoint.files == (path,) and not tensor_suffix(path) and format_plugin(path) is not None


def _and_above(path: str) -> list[str]:
    """Return a path and the folders that it is in."""
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
