"""Pointers beside checkpoints: ``latest``, Megatron's tracker file, links such as ``final.pt``.

They belong to no checkpoint, but a trainer resumes by them: a wrong one is worth a word, and rollbacks point them back.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Collection, Mapping, Sequence

from ckptguard.errors import CouldNotTellError, ObjectMissingError
from ckptguard.formats import tensor_suffix
from ckptguard.formats.suffixes import is_pointer
from ckptguard.formats.text_files import read_pointer
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import escape, series_of
from ckptguard.values.verdict import Outcome

_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{1,12})")


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
        name = None
        with contextlib.suppress(CouldNotTellError):
            name = _read_name(run, entry.key)
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
    """The paths that pointers of a listing name, and which pointer does. CouldNotTellError if one is unreadable."""
    found = {}
    for entry in entries:
        if entry.kind == "file" and is_pointer(entry.key, b""):
            name = _read_name(run, entry.key)
            if name is not None:
                found[f"{entry.key.rpartition('/')[0]}/{name}".lstrip("/")] = entry.key
    return found


def point_back(run: Run, known_good: str, present: Collection[str]) -> list[str]:
    """Have pointers beside a checkpoint name it, if they name one of its series that is not `present` (paths). Returns
    the pointers that were written anew. Without this, DeepSpeed would start from scratch and say so in a warning."""
    folder, _, name = known_good.rpartition("/")
    above = f"{folder}/" if folder else ""
    words = {f"{above}latest": name}
    if iteration := _ITERATION.fullmatch(name):
        words[above + _TRACKER] = str(int(iteration[1]))
    written = []
    for key, word in words.items():
        named = _read_if_there(run, key)
        if named is not None and above + named not in present and series_of(above + named) == series_of(known_good):
            _replace(run, key, word.encode())
            written.append(key)
    return written


def _dangles(run: Run, entry: Entry) -> bool:
    return run.storage.root is not None and not os.path.exists(os.path.join(run.storage.root, *entry.key.split("/")))


def _read_name(run: Run, key: str) -> str | None:
    """The name that a pointer says; None if that could be none."""
    with run.storage.open(key) as reader:
        name = read_pointer(reader, key).metadata.get("points_to")
    if name is not None and key.rpartition("/")[2] == _TRACKER and name.isdecimal():
        return f"iter_{int(name):07d}"
    return name


def _read_if_there(run: Run, key: str) -> str | None:
    with contextlib.suppress(ObjectMissingError):
        if run.storage.stat(key).kind == "file":
            return _read_name(run, key)
    return None


def _replace(run: Run, key: str, content: bytes) -> None:
    temporary = f"{key.rpartition('/')[0]}/.tmp-{uuid.uuid4().hex[:8]}".lstrip("/")
    run.storage.create(temporary, content)
    if run.storage.root is not None:
        with translated(key, run.url):
            os.replace(os.path.join(run.storage.root, temporary), os.path.join(run.storage.root, key))
        return
    run.storage.remove(key)
    run.storage.move(temporary, key)
