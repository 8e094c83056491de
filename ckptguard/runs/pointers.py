"""Read and rewrite pointers beside checkpoints: ``latest``, Megatron's tracker file, links such as ``final.pt``.

They belong to no checkpoint, but a trainer resumes from what they name. Wrong ones are reported, and a rollback
rewrites them.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from ckptguard.decisions.rollback_plan import Mention, Pointed, Pointer, is_below
from ckptguard.errors import CouldNotTellError
from ckptguard.formats import tensor_suffix
from ckptguard.formats.table import is_pointer, may_be_pointer
from ckptguard.formats.text_files import read_pointer
from ckptguard.layouts.step_names import may_be_of_rank
from ckptguard.records.rewrites import Rewrite
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Entry, find_entry, is_encodable
from ckptguard.values.ids import escape, folder_of, is_safe_path
from ckptguard.values.temporary_names import LINK
from ckptguard.values.verdict import Outcome

_TRACKER = "latest_checkpointed_iteration.txt"
_LONGEST_LINE = 4096
_LONGEST_TEXT = 64 * 1024  # a longer text is not searched for names of checkpoints
_POINTER = re.compile(r"([^\s,]+)(?:\r?\n)?")
_ITERATION = re.compile(r"iter_(\d{1,12})")


def pointer_notes(view: RunView, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return a sentence for each pointer outside checkpoints that names nothing, or a bad or incomplete checkpoint.

    `outcomes` are by path. Pointers that cannot be read are left out.
    """
    run = view.run
    try:
        entries = view.entries
    except CouldNotTellError:
        return []
    present = {"/".join(e.key.split("/")[:n]) for e in entries for n in range(1, e.key.count("/") + 2)}
    notes = []
    for entry in _outside_checkpoints(view):
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
    """Return every link and file whose only content is the name or path of a checkpoint in some folders.

    A file counts only if loaders read files with its name, or if the setting `pointers` has it. Such a file is in one
    of the folders or above it, unless its name is certain.
    """
    found = []
    by_rank = (c for c in view.checkpoints if c.path in c.files and may_be_of_rank(c.path.rpartition("/")[2]))
    by_file = {key: c.path for c in by_rank for key in c.files}
    for entry in _outside_checkpoints(view):
        sure = entry.kind == "link" or is_pointer(entry.key, b"")
        text = path = None
        with contextlib.suppress(CouldNotTellError):
            if entry.kind == "link":
                path = _linked_path(view.run, entry.key)
            elif _is_named_pointer(view, entry) and (sure or _is_around(entry, folders)):
                text = _only_name(_read_bytes(view.run, entry.key), entry.key)
        if text and not _leads_elsewhere(view.run, entry.key, text):
            path = _named(view, entry.key, text)
        if path and folder_of(path) in folders:
            far = text is None or ("/" in text and path in (_beside(entry.key, text), text[-len(path) :]))
            whole = by_file.get(path)
            leads = whole is not None or view.checkpoint(path) is not None
            found.append(
                Pointer(
                    key=entry.key,
                    names=whole or path,
                    leads=leads,
                    sure=sure,
                    far=far,
                    file=path if whole is not None else "",
                )
            )
    return found


def mentions_of(
    view: RunView, folders: frozenset[str], gone: Collection[str], pointers: Collection[Pointer]
) -> tuple[Mention, ...]:
    """Return the small texts around some folders that mention one of the paths `gone`, and are no pointers."""
    known = {pointer.key for pointer in pointers}
    words = {path: re.compile(rf"(?<![\w.-]){re.escape(path.rpartition('/')[2])}(?![\w-]|\.\w)") for path in gone}
    found = []
    for entry in _outside_checkpoints(view) if words else ():
        if entry.key in known or entry.kind != "file" or not 0 < entry.size <= _LONGEST_TEXT:
            continue
        if tensor_suffix(entry.key) or not _is_around(entry, folders):
            continue
        with contextlib.suppress(CouldNotTellError, UnicodeDecodeError):
            text = _read_bytes(view.run, entry.key).decode()
            path = next((path for path, word in words.items() if word.search(text)), None)
            if path is not None:
                found.append(Mention(key=entry.key, path=path))
    return tuple(found)


def rewritten(run: Run, pointed: Iterable[Pointed], pointers: Iterable[Pointer]) -> list[Rewrite]:
    """Return what each pointer holds, and what it must hold to name its new path. Raises CouldNotTellError.

    A pointer that is no longer what it was is left out.
    """
    named = {pointer.key: pointer.file or pointer.names for pointer in pointers}
    found = []
    for pointer in pointed:
        key = pointer.key
        entry = find_entry(run.storage, key)
        if entry is None or entry.kind not in ("link", "file"):
            continue
        if entry.kind == "link":
            if entry.target is not None:
                found.append(Rewrite(key=key, link=True, old=entry.target, new=_seen_from(key, pointer.path)))
            continue
        content = _read_bytes(run, key)
        line = _only_line(content)
        if _only_name(content, key) is None or line is None:
            continue
        new = _renamed(key, line, named[key], pointer.path)
        iteration = _ITERATION.fullmatch(new) if key.rpartition("/")[2] == _TRACKER else None
        end = content.decode()[len(line) :]
        mode, mtime_ns = _mode_and_time(run, key)
        text = (str(int(iteration[1])) if iteration else new) + end
        found.append(Rewrite(key=key, link=False, old=line + end, new=text, mode=mode, mtime_ns=mtime_ns))
    return found


def write_pointers(run: Run, rewrites: Iterable[Rewrite]) -> None:
    """Make pointers hold their new content. One that holds neither the old nor the new content is left alone."""
    for one in rewrites:
        if holds(run, one.key, one.link) == one.old:
            _put(run, one.key, one.link, one.new)


def put_back_pointers(run: Run, rewrites: Iterable[Rewrite]) -> tuple[list[str], list[str]]:
    """Give pointers their old content, mode and time. Returns the keys that were put back, and those that others
    changed since, which stay."""
    done, left = [], []
    for one in rewrites:
        now = holds(run, one.key, one.link)
        if now == one.new:
            _put(run, one.key, one.link, one.old)
        if now not in (one.new, one.old):
            left.append(one.key)
            continue
        if run.storage.root is not None and not one.link:
            place = os.path.join(run.storage.root, *one.key.split("/"))
            with translated(one.key, run.url):
                descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if one.mode is not None:
                        os.fchmod(descriptor, one.mode)
                    if one.mtime_ns is not None:
                        os.utime(descriptor, ns=(one.mtime_ns, one.mtime_ns))
                finally:
                    os.close(descriptor)
        done.append(one.key)
    return done, left


def holds(run: Run, key: str, link: bool) -> str | None:
    """Return the text of a pointer, or the target of a link, or None for anything else."""
    entry = find_entry(run.storage, key)
    if entry is None or entry.kind != ("link" if link else "file"):
        return None
    if link:
        return entry.target
    if entry.size > _LONGEST_LINE:
        return None
    with contextlib.suppress(UnicodeDecodeError):
        return _read_bytes(run, key).decode()
    return None


def _put(run: Run, key: str, link: bool, content: str) -> None:
    if link:
        _replace_link(run, key, content)
    else:
        _replace(run, key, content.encode())


def _outside_checkpoints(view: RunView) -> Iterator[Entry]:
    owned = {key for c in view.checkpoints for key in (*c.files, *(e.key for e in c.irregular))}
    return (entry for entry in view.entries if entry.key not in owned)


def _is_around(entry: Entry, folders: frozenset[str]) -> bool:
    around = folder_of(entry.key)
    return any(is_below(folder, around) or folder == around for folder in folders)


def _is_named_pointer(view: RunView, entry: Entry) -> bool:
    """True if a file may be rewritten, judged by its name and size."""
    if entry.kind != "file" or not 0 < entry.size <= _LONGEST_LINE:
        return False
    by_user = any(fnmatchcase(entry.key, pattern) for pattern in view.settings.pointers)
    return may_be_pointer(entry.key) or (by_user and not tensor_suffix(entry.key))


def _only_line(content: bytes) -> str | None:
    """Return the text before one end of line, if the content is nothing else and has no blank, comma or ``://``."""
    try:
        match = _POINTER.fullmatch(content.decode())
    except UnicodeDecodeError:
        return None
    line = match[1] if match else None
    return line if line and line.isprintable() and "://" not in line else None


def _only_name(content: bytes, key: str) -> str | None:
    """Return the name or path that is the whole content, else None."""
    line = _only_line(content)
    if line is None or not is_safe_path(line.rpartition("/")[2]):
        return None
    if is_pointer(key, b"") and ".." in line.split("/"):  # its loader looks in the pointer's own folder
        return None
    if key.rpartition("/")[2] == _TRACKER:
        return f"iter_{int(line):07d}" if line.isdecimal() else None
    return line


def _mode_and_time(run: Run, key: str) -> tuple[int | None, int | None]:
    if run.storage.root is None:
        return None, None
    with translated(key, run.url):
        status = os.lstat(os.path.join(run.storage.root, *key.split("/")))
    return stat.S_IMODE(status.st_mode), status.st_mtime_ns


def _beside(key: str, name: str) -> str:
    return f"{key.rpartition('/')[0]}/{name}".lstrip("/")


def _read_bytes(run: Run, key: str) -> bytes:
    with run.storage.open(key) as reader:
        return reader.read(0, reader.entry.size)


def _named(view: RunView, key: str, text: str) -> str:
    """Return the path that a text names: a checkpoint relative to the pointer or to a folder around the run. If there
    is none, return the text's last part beside the pointer."""
    parts = text.split("/")
    ends = ("/".join(parts[n:]) for n in range(len(parts) - 1))  # of several parts: a single name is beside the pointer
    seen = (path for path in (_beside(key, text), *ends) if view.checkpoint(path) is not None)
    return next(seen, _beside(key, parts[-1]))


def _leads_elsewhere(run: Run, key: str, text: str) -> bool:
    """True if a path in a text leads out of the run to something that is there: another run may have equal names."""
    root = run.storage.root
    if root is None or is_safe_path(posixpath.normpath(_beside(key, text)) if not text.startswith("/") else ""):
        return False
    place = os.path.join(root, *key.split("/")[:-1], text)  # an absolute path as it is
    folder = os.path.realpath(os.path.dirname(place))
    return os.path.lexists(place) and folder != (own := os.path.realpath(root)) and not is_below(folder, own)


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
        target = os.readlink(place)
        if not is_encodable(target):
            return None
        leads_to = os.path.relpath(os.path.join(os.path.dirname(place), target), run.storage.root)
        return leads_to if is_safe_path(leads_to) else None
    return None


def _replace_link(run: Run, key: str, name: str) -> None:
    assert run.storage.root is not None
    place = os.path.join(run.storage.root, *key.split("/"))
    temporary = os.path.join(os.path.dirname(place), LINK.new())
    with translated(key, run.url):
        os.symlink(name, temporary)
        with contextlib.suppress(OSError):
            before = os.lstat(place)
            os.lchown(temporary, before.st_uid, before.st_gid)
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
