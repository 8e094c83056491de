"""Checkpoints that a layout of another package finds: what it adds to those that ours found."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckptguard.formats import tensor_suffix
from ckptguard.formats.strict_json import printable
from ckptguard.layouts import Checkpoint, plain_folder, step_from_name
from ckptguard.plugins.call import CALL_SECONDS, PluginError, call_plugin
from ckptguard.plugins.installed import find_plugin, format_plugin
from ckptguard.plugins.interface import FoundCheckpoint
from ckptguard.records.run import Run
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import is_safe_path, series_of

_MOST_REMEMBERED = 64  # answers
_answers: dict[tuple[str, tuple[str, ...]], tuple[FoundCheckpoint, ...]] = {}


def with_plugin_layouts(run: Run, entries: Sequence[Entry], found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints of a listing, with what the layouts say that the run's settings name.

    Of a checkpoint that ours found, a layout only says what is missing. Others it makes of files that only plugins
    read. If it gives no answer, that is a doubt about every checkpoint of the run.
    """
    by_path = {c.path: c for c in found}
    said = [_asked(name, run, entries) for name in dict.fromkeys(run.layouts)]
    for one in (one for _, _, answer in said for one in answer):
        ours = [c for c in by_path.values() if not _is_by_plugin(c)]
        own = by_path.get(one.path) or _new(one, entries, ours)
        if own is not None:
            by_path = {path: c for path, c in by_path.items() if path not in own.files or path == own.path}
            missing = (*own.missing, *map(printable, one.missing))
            by_path[own.path] = msgspec.structs.replace(own, missing=missing)
    notes = tuple((label, trouble) for label, trouble, _ in said)
    return [msgspec.structs.replace(c, asked=notes) for c in by_path.values()]


def _asked(name: str, run: Run, entries: Sequence[Entry]) -> tuple[str, str, tuple[FoundCheckpoint, ...]]:
    """Return the name and version of a layout, why it gave no answer, and its answer."""
    plugin = find_plugin("layouts", name)
    if plugin is None:
        return f"layouts/{name}", f"the layout {name} of the setting `layouts` is not installed", ()
    names = tuple(sorted(e.key for e in entries if e.kind == "file"))
    key = (plugin.label, names)
    try:
        if key not in _answers:
            answer = call_plugin(
                plugin, names, tuple[FoundCheckpoint, ...], memory=run.plugin_memory, seconds=CALL_SECONDS
            )
            while len(_answers) >= _MOST_REMEMBERED:
                _answers.pop(next(iter(_answers)), None)
            _answers[key] = answer
    except PluginError as error:
        return plugin.label, error.message, ()
    return plugin.label, "", _answers[key]


def _new(one: FoundCheckpoint, entries: Sequence[Entry], ours: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return a checkpoint of files that no format of ours knows; None if the layout claims others, or none that a
    plugin reads."""
    files = {e.key: e for e in entries if e.kind == "file" and not tensor_suffix(e.key)}
    inside = all(file.startswith(f"{one.path}/") for file in one.files)
    around = any(_is_below(one.path, c.path) or _is_below(c.path, one.path) for c in ours)
    read = any(format_plugin(file) is not None for file in one.files)
    if not (inside and read and files.keys() >= set(one.files)) or around or not is_safe_path(one.path):
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


def _is_below(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")
