"""Checksum files in the styles of md5sum and sha256sum (GNU and BSD), and where they apply."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckptguard.errors import SettingsError
from ckptguard.names import escape, is_safe_path

_ALGORITHMS = {32: "md5", 40: "sha1", 64: "sha256"}
_GNU = re.compile(r"\\?(?P<digest>[0-9a-fA-F]{32,64}) [ *](?P<path>.+)")
_BSD = re.compile(r"(?P<algorithm>MD5|SHA1|SHA256) ?\((?P<path>.+)\) ?= ?(?P<digest>[0-9a-fA-F]{32,64})")
_MOST_LINES = 1_000_000


def parse_check_sums(text: str, source: str) -> dict[str, tuple[str, str]]:
    """Path -> (algorithm, lower-case hex digest). SettingsError names the line that is neither style."""
    sums: dict[str, tuple[str, str]] = {}
    for number, line in enumerate(text.splitlines()[:_MOST_LINES], 1):
        if not line.strip() or line.startswith(("#", ";")):
            continue
        match = _GNU.fullmatch(line) or _BSD.fullmatch(line)
        digest = match["digest"].lower() if match else ""
        if match is None or len(digest) not in _ALGORITHMS:
            raise SettingsError(f"{source}, line {number}: neither md5sum's nor sha256sum's style: {escape(line[:80])}")
        path = match["path"].removeprefix("./")
        if not is_safe_path(path):
            raise SettingsError(f"{source}, line {number}: an unsafe path: {escape(path[:80])}")
        sums[path] = (_ALGORITHMS[len(digest)], digest)
    if not sums:
        raise SettingsError(f"{source} states no checksums")
    return sums


def sums_for(sums: Mapping[str, tuple[str, str]], prefix: str, files: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The stated sums as keys of the storage, for the target `prefix` with these files.

    For a target that is one file its name decides, wherever the list puts it. For a folder, stated paths are relative
    to it, or to the folder around it (``md5sum model/*``); every stated file counts, there or not. SettingsError if
    the list says nothing about the target, or two things about one file.
    """
    name = prefix.rpartition("/")[2]
    if list(files) == [prefix]:
        stated = {sum_ for path, sum_ in sums.items() if path.rpartition("/")[2] == name}
        if len(stated) != 1:
            what = "no sum" if not stated else f"{len(stated)} different sums"
            raise SettingsError(f"the checksum file states {what} for {escape(name)}")
        return {prefix: stated.pop()}
    if all(path.startswith(name + "/") for path in sums) and not any(f"{prefix}/{path}" in files for path in sums):
        sums = {path.removeprefix(name + "/"): stated for path, stated in sums.items()}
    found = {f"{prefix}/{path}": stated for path, stated in sums.items()}
    if not any(key in files for key in found):
        raise SettingsError(f"the checksum file names no file of {escape(name)}")
    return found
