"""Pointers beside checkpoints: ``latest``, Megatron's tracker file, links such as ``final.pt``.

They belong to no checkpoint, but a trainer resumes by them, so a wrong one is worth a word.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ckptguard.errors import CouldNotTellError
from ckptguard.formats import tensor_suffix
from ckptguard.formats.suffixes import is_pointer
from ckptguard.formats.text_files import read_pointer
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import escape
from ckptguard.values.verdict import Outcome

_TRACKER = "latest_checkpointed_iteration.txt"


def pointer_notes(view: RunView, outcomes: Mapping[str, Outcome]) -> list[str]:
    """A sentence for each pointer outside checkpoints that names nothing, or a checkpoint that is bad or incomplete
    (`outcomes` by path). A listing or file that cannot be read says nothing."""
    run = view.run
    try:
        entries, checkpoints = view.entries, view.checkpoints
    except CouldNotTellError:
        return []
    owned = {key for c in checkpoints for key in (*c.files, *(e.key for e in c.irregular))}
    present = {"/".join(e.key.split("/")[:n]) for e in entries for n in range(1, e.key.count("/") + 2)}
    notes = []
    for entry in entries:
        if entry.key in owned:
            continue
        if entry.kind == "link" and tensor_suffix(entry.key) and _dangles(run, entry):
            notes.append(f"{escape(entry.key)} is a link to nothing")
        if entry.kind != "file" or not is_pointer(entry.key, b""):
            continue
        name = _named(run, entry)
        if name is None:
            notes.append(f"{escape(entry.key)} names no checkpoint")
            continue
        path = f"{entry.key.rpartition('/')[0]}/{name}".lstrip("/")
        if path not in present:
            notes.append(f"{escape(entry.key)} names {escape(name)}, which is not there")
        elif outcomes.get(path) in (Outcome.BAD, Outcome.INCOMPLETE):
            notes.append(f"{escape(entry.key)} names {escape(name)}, which is {outcomes[path].value}")
    return notes


def pointed_to(run: Run, entries: Sequence[Entry]) -> dict[str, str]:
    """The paths that pointers of a run's listing name, and which pointer does. CouldNotTellError if one of them cannot
    be read."""
    found = {}
    for entry in entries:
        if entry.kind == "file" and is_pointer(entry.key, b""):
            name = _read_name(run, entry)
            if name is not None:
                found[f"{entry.key.rpartition('/')[0]}/{name}".lstrip("/")] = entry.key
    return found


def _dangles(run: Run, entry: Entry) -> bool:
    return run.storage.root is not None and not os.path.exists(os.path.join(run.storage.root, *entry.key.split("/")))


def _named(run: Run, entry: Entry) -> str | None:
    try:
        return _read_name(run, entry)
    except CouldNotTellError:
        return None


def _read_name(run: Run, entry: Entry) -> str | None:
    with run.storage.open(entry.key) as reader:
        name = read_pointer(reader, entry.key).metadata.get("points_to")
    if name is not None and entry.name == _TRACKER and name.isdigit():
        return f"iter_{int(name):07d}"
    return name
