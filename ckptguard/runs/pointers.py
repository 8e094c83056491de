"""Read and rewrite pointers beside checkpoints: ``latest``, Megatron's tracker file, links such as ``final.pt``.

They belong to no checkpoint, but a trainer resumes from what they name. Wrong ones are reported, and a rollback
rewrites them.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence

from ckptguard.decisions.rollback_plan import Pointed, Pointer, is_below
from ckptguard.errors import CouldNotTellError
from ckptguard.formats import tensor_suffix
from ckptguard.formats.suffixes import is_pointer
from ckptguard.formats.text_files import read_pointer
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.values.ids import escape, folder_of, is_safe_path
from ckptguard.values.verdict import Outcome

_TRACKER = "latest_checkpointed_iteration.txt"
_LONGEST_LINE = 4096
_ITERATION = re.compile(r"iter_(\d{1,12})")


def pointer_notes(view: RunView, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return a sentence for each pointer outside checkpoints that names nothing, or a bad or incomplete checkpoint.

    `outcomes` are by path. Pointers that cannot be read are left out.
    """
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
    """Map each path that a pointer of a listing names to that pointer's key. Raises CouldNotTellError."""
    found = {}
    for entry in entries:
        if entry.kind == "file" and is_pointer(entry.key, b""):
            name = _read_name(run, entry.key)
            if name is not None:
                found[_beside(entry.key, name)] = entry.key
    return found


def pointers_in(view: RunView, folders: frozenset[str]) -> list[Pointer]:
    """Return everything that may name a checkpoint of some folders, and can be read.

    These are pointers, links and small files of one line that ends in a checkpoint's name, such as detectron2's
    ``last_checkpoint``. Such a file counts if it is in one of the folders or above it.
    """
    owned = {key for c in view.checkpoints for key in (*c.files, *(e.key for e in c.irregular))}
    found = []
    for entry in view.entries:
        if entry.key in owned:
            continue
        sure = entry.kind == "link" or is_pointer(entry.key, b"")
        text = path = None
        with contextlib.suppress(CouldNotTellError):
            if entry.kind == "link":
                path = _linked_path(view.run, entry.key)
            elif entry.kind == "file" and sure:
                text = _read_name(view.run, entry.key)
            elif entry.kind == "file" and 0 < entry.size <= _LONGEST_LINE and not tensor_suffix(entry.key):
                around = folder_of(entry.key)
                text = _line(view.run, entry.key) if any(is_below(f, around) or f == around for f in folders) else None
        path = path or (text and _named(view, entry.key, text))
        if path and folder_of(path) in folders:
            far = text is None or ("/" in text and path in (_beside(entry.key, text), text[-len(path) :]))
            leads = view.checkpoint(path) is not None
            found.append(Pointer(key=entry.key, names=path, leads=leads, sure=sure, far=far))
    return found


def point_back(run: Run, pointed: Iterable[Pointed], pointers: Iterable[Pointer]) -> None:
    """Make pointers name other checkpoints. Otherwise DeepSpeed would start from scratch with only a warning."""
    named = {pointer.key: pointer.names for pointer in pointers}
    for pointer in pointed:
        key = pointer.key
        if _kind(run, key) == "link":
            _replace_link(run, key, _seen_from(key, pointer.path))
            continue
        text = _read_text(run, key)
        line = text.strip()
        new = _renamed(key, line, named[key], pointer.path)
        iteration = _ITERATION.fullmatch(new) if key.rpartition("/")[2] == _TRACKER else None
        _replace(run, key, text.replace(line, str(int(iteration[1])) if iteration else new).encode())


def _kind(run: Run, key: str) -> str | None:
    entry = find_entry(run.storage, key)
    return None if entry is None else entry.kind


def _beside(key: str, name: str) -> str:
    return f"{key.rpartition('/')[0]}/{name}".lstrip("/")


def _read_text(run: Run, key: str) -> str:
    with run.storage.open(key) as reader:
        return reader.read(0, reader.entry.size).decode("utf-8", "replace")


def _line(run: Run, key: str) -> str | None:
    """Return the one line of a text that may be a path, else None."""
    line = _read_text(run, key).strip()
    return line if line and line.isprintable() and is_safe_path(line.rpartition("/")[2]) else None


def _named(view: RunView, key: str, text: str) -> str:
    """Return the path that a text names: a checkpoint relative to the pointer or to a folder around the run. If there
    is none, return the text's last part beside the pointer."""
    parts = text.split("/")
    ends = ("/".join(parts[n:]) for n in range(len(parts) - 1))  # of several parts: a single name is beside the pointer
    seen = (path for path in (_beside(key, text), *ends) if view.checkpoint(path) is not None)
    return next(seen, _beside(key, parts[-1]))


def _renamed(key: str, text: str, old: str, new: str) -> str:
    """Return a text that names another path in the same style."""
    if _beside(key, text) == old:
        return _seen_from(key, new)
    last = old if "/" in old and f"/{text}".endswith(f"/{old}") else text.rpartition("/")[2]
    return text[: len(text) - len(last)] + (new if last == old else new.rpartition("/")[2])


def _seen_from(key: str, path: str) -> str:
    return posixpath.relpath(path, folder_of(key) or ".")


def _linked_path(run: Run, key: str) -> str | None:
    """Return the path in the run that a link points to, or None if it points outside."""
    if run.storage.root is None:
        return None
    place = os.path.join(run.storage.root, *key.split("/"))
    with contextlib.suppress(OSError):
        leads_to = os.path.relpath(os.path.join(os.path.dirname(place), os.readlink(place)), run.storage.root)
        return leads_to if is_safe_path(leads_to) else None
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
    """Return the name that a pointer states, or None if that cannot be a name."""
    with run.storage.open(key) as reader:
        name = read_pointer(reader, key).metadata.get("points_to")
    if name is not None and key.rpartition("/")[2] == _TRACKER and name.isdecimal():
        return f"iter_{int(name):07d}"
    return name


def _replace(run: Run, key: str, content: bytes) -> None:
    with run.storage.upload(key, replace=True) as upload:
        upload.write(content)
        upload.commit()
