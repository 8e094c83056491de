"""Pointers beside checkpoints: ``latest``, Megatron's tracker file, links such as ``final.pt``.

They belong to no checkpoint, but a trainer resumes by them: a wrong one is worth a word, and rollbacks point them back.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence

from ckptguard.decisions.rollback_plan import Pointed, Pointer
from ckptguard.errors import CouldNotTellError
from ckptguard.formats import tensor_suffix
from ckptguard.formats.suffixes import is_pointer
from ckptguard.formats.text_files import read_pointer
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.values.ids import escape, is_safe_path
from ckptguard.values.verdict import Outcome

_TRACKER = "latest_checkpointed_iteration.txt"
_LONGEST_LINE = 4096
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
        path = _beside(entry.key, name)
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
                found[_beside(entry.key, name)] = entry.key
    return found


def pointers_in(view: RunView, folder: str) -> list[Pointer]:
    """What may name a checkpoint of a folder, and lies there too: pointers, links, and any other small file of a single
    line that ends in the name of one (detectron2's ``last_checkpoint``). What cannot be read is none."""
    owned = {key for c in view.checkpoints for key in (*c.files, *(e.key for e in c.irregular))}
    found = []
    for entry in view.entries:
        if entry.key in owned or entry.key.rpartition("/")[0] != folder:
            continue
        sure = entry.kind == "link" or is_pointer(entry.key, b"")
        name = None
        with contextlib.suppress(CouldNotTellError):
            if entry.kind == "link":
                name = _linked_name(view.run, entry.key)
            elif entry.kind == "file" and sure:
                name = _read_name(view.run, entry.key)
            elif entry.kind == "file" and 0 < entry.size <= _LONGEST_LINE and not tensor_suffix(entry.key):
                name = _last_word(_read_text(view.run, entry.key))
        if name:
            path = _beside(entry.key, name)
            found.append(Pointer(key=entry.key, names=path, leads=view.checkpoint(path) is not None, sure=sure))
    return found


def point_back(run: Run, pointed: Iterable[Pointed]) -> None:
    """Have pointers name other checkpoints of their folder. Without this, DeepSpeed would start from scratch and say so
    in a warning."""
    for pointer in pointed:
        key, name = pointer.key, pointer.path.rpartition("/")[2]
        if _kind(run, key) == "link":
            _replace_link(run, key, name)
        elif is_pointer(key, b""):
            iteration = _ITERATION.fullmatch(name) if key.rpartition("/")[2] == _TRACKER else None
            _replace(run, key, (str(int(iteration[1])) if iteration else name).encode())
        else:
            text = _read_text(run, key)
            line = text.rstrip()
            before = line[: len(line) - len(_last_word(text) or "")]
            _replace(run, key, (before + name + text[len(line) :]).encode())


def _kind(run: Run, key: str) -> str | None:
    entry = find_entry(run.storage, key)
    return None if entry is None else entry.kind


def _beside(key: str, name: str) -> str:
    return f"{key.rpartition('/')[0]}/{name}".lstrip("/")


def _read_text(run: Run, key: str) -> str:
    with run.storage.open(key) as reader:
        return reader.read(0, reader.entry.size).decode("utf-8", "replace")


def _last_word(text: str) -> str | None:
    """The last part of the path that one line of text is; None for anything else."""
    line = text.strip()
    name = line.rpartition("/")[2]
    return name if line and line.isprintable() and is_safe_path(name) else None


def _linked_name(run: Run, key: str) -> str | None:
    """The name beside a link that it leads to; None where it leads elsewhere."""
    if run.storage.root is None:
        return None
    place = os.path.join(run.storage.root, *key.split("/"))
    with contextlib.suppress(OSError):
        folder = os.path.dirname(place)
        leads_to = os.path.normpath(os.path.join(folder, os.readlink(place)))
        name = os.path.basename(leads_to)
        return name if os.path.dirname(leads_to) == folder and is_safe_path(name) else None
    return None


def _replace_link(run: Run, key: str, name: str) -> None:
    assert run.storage.root is not None
    place = os.path.join(run.storage.root, *key.split("/"))
    temporary = os.path.join(os.path.dirname(place), f".tmp-{uuid.uuid4().hex[:8]}")
    with translated(key, run.url):
        os.symlink(name, temporary)
        os.replace(temporary, place)


def _dangles(run: Run, entry: Entry) -> bool:
    return run.storage.root is not None and not os.path.exists(os.path.join(run.storage.root, *entry.key.split("/")))


def _read_name(run: Run, key: str) -> str | None:
    """The name that a pointer says; None if that could be none."""
    with run.storage.open(key) as reader:
        name = read_pointer(reader, key).metadata.get("points_to")
    if name is not None and key.rpartition("/")[2] == _TRACKER and name.isdecimal():
        return f"iter_{int(name):07d}"
    return name


def _replace(run: Run, key: str, content: bytes) -> None:
    with run.storage.upload(key, replace=True) as upload:
        upload.write(content)
        upload.commit()
