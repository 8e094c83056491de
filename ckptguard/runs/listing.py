"""The checkpoints of a run as storage shows them now."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.errors import NotFoundError, RecordsError
from ckptguard.layouts import Checkpoint, enter, find_checkpoints, step_from_name
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.manifests import read_manifest, sealed_generations
from ckptguard.records.run import Run, list_records
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import parse_id, series_from_folder, series_of


def list_checkpoints(run: Run) -> list[Checkpoint]:
    """All checkpoints in place, sorted by path. A failed listing raises: it never reads as "nothing here".

    A folder that no layout recognises any more (its weights are gone), but that was sealed before, is still one.
    """
    entries = run.storage.list("", recursive=True, enter=enter)
    found = find_checkpoints(entries, run.patterns)
    return sorted([*found, *_bereft(run, entries, found)], key=lambda c: c.path)


def find_checkpoint(run: Run, path: str) -> Checkpoint | None:
    """The checkpoint in place under exactly this path."""
    return next((c for c in list_checkpoints(run) if c.path == path), None)


def select_checkpoint(run: Run, word: str) -> Checkpoint:
    """The checkpoint in place that a user means by a path, an id or a step; NotFoundError if there is none."""
    checkpoints = list_checkpoints(run)
    name = word.rstrip("/").removeprefix(run.url.rstrip("/") + "/")
    chosen = [c for c in checkpoints if c.path == name]
    if not chosen:
        parsed = parse_id(word)
        step = parsed[0] if parsed else int(word) if word.isascii() and word.isdigit() else None
        chosen = [c for c in checkpoints if step is not None and c.step == step]
    if len(chosen) > 1:
        paths = ", ".join(c.path for c in chosen)
        raise NotFoundError(f"{word} may mean any of {paths}", hint="name it by its path")
    if not chosen:
        raise NotFoundError(f"there is no checkpoint {word} in {run.url}")
    return chosen[0]


def _bereft(run: Run, entries: Sequence[Entry], found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Sealed folders of which only files remain that make no checkpoint of it."""
    folders: dict[str, list[Entry]] = {}
    for entry in entries:
        parts = entry.key.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            folders.setdefault("/".join(parts[:depth]), []).append(entry)
    taken = {c.path for c in found}
    known = {series_from_folder(folder) for folder in list_records(run, MANIFESTS)}
    lost = []
    for folder, own in folders.items():
        series = series_of(folder)
        if series not in known or folder in taken:
            continue
        step = step_from_name(folder.rpartition("/")[2])
        layout = _sealed_layout(run, series, step, folder)
        if layout is not None:
            files = [e for e in own if e.kind == "file"]
            others = [e for e in own if e.kind not in ("file", "folder")]
            lost.append(
                Checkpoint(
                    path=folder,
                    layout=layout,
                    series=series,
                    step=step,
                    entries=tuple(sorted(files, key=lambda e: e.key)),
                    irregular=tuple(sorted(others, key=lambda e: e.key)),
                )
            )
    return lost


def _sealed_layout(run: Run, series: str, step: int | None, path: str) -> str | None:
    """The layout under which a path was sealed, if it was."""
    for key in sealed_generations(run, series):
        if key[0] == step:
            try:
                manifest = read_manifest(run, series, *key)
            except RecordsError:
                continue
            if manifest is not None and manifest.path == path:
                return manifest.layout
    return None
