"""Read a settings file, and say why somebody else may have written it.

Such a file must not give commands, addresses or keys: a downloaded run, or a folder that others may write, would run
commands as this user.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from ckptguard.errors import CkptguardError, SettingsError
from ckptguard.values.ids import RECORDS_FOLDER, escape

_LONGEST = 1 << 20  # bytes of a file that the user names
_LONGEST_FOUND = 1 << 16  # of one that was found: Python's reader of TOML takes the square of a long name's length
_MOST_LINKS = 40
_RUN_DEPTH = 3  # levels of a run below its records, as in `resolve_target`
_ANSWER_SECONDS = 2.0
_NAME_IT = "name the file with --config, or use CKPTGUARD_* variables"


class Doubt(NamedTuple):
    """Why a file may be somebody else's words, and what makes it the user's own."""

    why: str
    remedy: str


class FoundFile(NamedTuple):
    """The text of a settings file, and the doubt about it, if there is one."""

    text: str
    doubt: Doubt | None


def read_own(path: str, what: str, *, named: bool) -> FoundFile:
    """Read the `what` in a file, and judge the very file that is read. SettingsError if it cannot be read.

    A `named` file is the user's own unless another user owns it or can change it. For a file that was found in the
    current folder each folder and link on the way to it counts, too.
    """
    shown = escape(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if named else os.O_NONBLOCK))
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            doubt = _doubt_of_file(shown, found) or (None if named else _doubt_on_the_way(path, found))
            longest = _LONGEST if named else _LONGEST_FOUND
            text = file.read(longest + 1)
    except OSError as error:
        raise SettingsError(f"cannot read the {what} in {shown}: {error.strerror}") from error
    if len(text) > longest:
        raise SettingsError(f"{shown} is too large for a {what} file")
    try:
        return FoundFile(text.decode("utf-8"), doubt)
    except UnicodeDecodeError as error:
        raise SettingsError(f"{shown} is no {what} file: it is not UTF-8 text") from error


def doubt_of_place(folder: str, targets: Iterable[str]) -> Doubt | None:
    """Return the doubt about a settings file in this folder, if the folder is in a run or in one of the targets.

    Who made the run could have put the file there. A target that does not answer is not the current folder.
    """
    above = _with_folders_above(os.path.realpath(folder))
    in_run = any(os.path.lexists(os.path.join(one, RECORDS_FOLDER, "format.json")) for one in above[: _RUN_DEPTH + 1])
    found = threading.Event()

    def look() -> None:
        if any(_is_in(above, target) for target in targets):
            found.set()

    looking = threading.Thread(target=look, name="targets", daemon=True)
    looking.start()
    looking.join(_ANSWER_SECONDS)
    return Doubt("it is inside the run or fleet", _NAME_IT) if in_run or found.is_set() else None


def _with_folders_above(folder: str) -> list[str]:
    found = [folder]
    while (above := os.path.dirname(found[-1])) != found[-1]:
        found.append(above)
    return found


def _is_in(above: list[str], target: str) -> bool:
    """True if the first of these folders is the target, is in it, or is in the run around it."""
    from ckptguard.runs.target import run_around  # which most commands without a settings file do not need
    from ckptguard.storage import normalise_url

    try:
        place = normalise_url(target.rpartition("::")[2])  # of a chain of file systems, what it opens
    except CkptguardError:
        return False  # the command says so itself
    if "://" in place:
        return False
    if any(one.count("/") == place.count("/") and fnmatchcase(one, place) for one in above):
        return True  # a fleet's pattern
    return _is_among(place, above) or (_is_among(os.path.dirname(place), above) and run_around(place) is not None)


def _is_among(folder: str, folders: list[str]) -> bool:
    try:
        found = os.stat(folder)
        return any(os.path.samestat(found, os.stat(one)) for one in folders)
    except OSError:
        return False


def _doubt_of_file(shown: str, found: os.stat_result) -> Doubt | None:
    if not _is_trusted(found.st_uid):
        return Doubt("it belongs to another user", "use a copy of your own")
    if _others_may_write(found):
        return Doubt("other users can change it", f"chmod go-w {shown}")
    return None


def _doubt_on_the_way(path: str, opened: os.stat_result) -> Doubt | None:
    """The doubt about the folders and links that lead to an opened file.

    Who may change one of them can lead the path to another file, such as one that this user has unpacked.
    """
    try:
        place, links = "/", 0
        found = os.lstat(place)
        left = os.path.join(os.getcwd(), path).split("/")[::-1]
        while left:
            here = os.path.normpath(os.path.join(place, left.pop()))  # the links in it are resolved
            found, shown = os.lstat(here), escape(here)
            if not _is_trusted(found.st_uid):
                what = "link" if stat.S_ISLNK(found.st_mode) else "folder"
                return Doubt(f"the {what} {shown} belongs to another user", _NAME_IT)
            if stat.S_ISLNK(found.st_mode):
                links += 1
                target = os.readlink(here)
                left += target.split("/")[::-1]
                place = "/" if target.startswith("/") else place
                if links > _MOST_LINKS:
                    break
                continue
            if stat.S_ISDIR(found.st_mode) and not found.st_mode & stat.S_ISVTX and _others_may_write(found):
                return Doubt(f"other users can change the folder {shown}", _NAME_IT)
            place = here
    except OSError:
        return Doubt("its folder cannot be examined", _NAME_IT)
    return None if os.path.samestat(found, opened) else Doubt("it was replaced while it was read", "try again")


def _is_trusted(owner: int) -> bool:
    """True for this user and root, who can do anything as this user."""
    return owner in (os.geteuid(), 0)


def _others_may_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private_group(found.st_uid, found.st_gid)


def _is_private_group(owner: int, group: int) -> bool:
    """True for a user's own group, which many systems let write by default. Never for root's: containers share it."""
    import grp  # only where a group may write
    import pwd

    try:
        user, members = pwd.getpwuid(owner), grp.getgrgid(group)
    except KeyError:
        return False
    private = user.pw_gid == group != 0 and members.gr_name == user.pw_name
    return private and set(members.gr_mem) <= {user.pw_name}
