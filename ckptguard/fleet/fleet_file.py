"""The file that describes a fleet: where its runs are, and which settings they have. Pure: text in, values out."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.values.byte_sizes import parse_size
from ckptguard.values.settings import HARMLESS, Settings, with_table

DEEPEST = 8
_Tables = dict[str, dict[str, Any]]


class FleetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a fleet file says.

    `folders` are searched for runs, at most `depth` levels down. `settings` are for all runs, and a table of `runs`
    for those that fit its key: a shell pattern (fnmatch; ``*`` also matches ``/``), or a label such as ``team=vision``.
    All runs together may occupy `keep_bytes`.
    """

    folders: tuple[str, ...]
    depth: int = 2
    keep_bytes: float | str | None = None
    settings: dict[str, Any] = {}
    runs: _Tables = {}


def parse_fleet(text: str, path: str) -> FleetFile:
    """Parse a fleet file. Its relative folders are relative to the file.

    SettingsError names `path` and what is wrong, in one sentence.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # Python refuses a number of thousands of digits
        place = re.search(r"\(at (line \d+, column \d+)\)$", str(error))
        raise SettingsError(
            f"{path} is no fleet file: it is not valid TOML{f', see {place[1]}' if place else ''}",
            hint="name a folder, a URL, or a TOML file with a list of `folders`",
        ) from error
    if "folders" not in table:
        raise SettingsError(
            f"{path} is no fleet file: it has no list of `folders`", hint='write folders = ["/data/runs"] in it'
        )
    try:
        found = msgspec.convert(table, FleetFile)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: {_what_is_wrong(error)}") from error
    if not found.folders or not all(place.strip() for place in found.folders):
        raise SettingsError(f"{path}: folders must name at least one folder or URL, and none may be empty")
    if not 0 <= found.depth <= DEEPEST:
        raise SettingsError(f"{path}: depth must be between 0 and {DEEPEST}")
    if found.keep_bytes is not None:
        try:
            parse_size(found.keep_bytes)
        except SettingsError as error:
            raise SettingsError(f"{path}: keep_bytes: {error.message}", hint=error.hint) from error
    _check_tables(found, path)
    beside = os.path.dirname(path)
    return msgspec.structs.replace(found, folders=tuple(_beside(beside, place) for place in found.folders))


def harmless_part(file: FleetFile) -> tuple[FleetFile, tuple[str, ...]]:
    """Return what counts of a fleet file that another user may have written, and what does not: URLs, and all settings
    but `HARMLESS` ones."""
    folders = tuple(place for place in file.folders if "://" not in place and "::" not in place)
    tables = (file.settings, *file.runs.values())
    ignored = dict.fromkeys(name for table in tables for name in table if name not in HARMLESS)
    counted = msgspec.structs.replace(
        file,
        folders=folders,
        keep_bytes=None,
        settings=_harmless(file.settings),
        runs={pattern: _harmless(table) for pattern, table in file.runs.items()},
    )
    ignored |= {"keep_bytes": None} if file.keep_bytes is not None else {}
    return counted, (*(("URLs of folders",) if folders != file.folders else ()), *ignored)


def _harmless(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name in HARMLESS}


def _check_tables(found: FleetFile, path: str) -> None:
    """Refuse a mistake now, also in a table that no run fits yet."""
    with_table(Settings(), found.settings, f"{path}: [settings]")
    for pattern, table in found.runs.items():
        with_table(Settings(), table, f'{path}: [runs."{pattern}"]')


def _beside(folder: str, place: str) -> str:
    if "://" in place or "::" in place or place.startswith(("~", "/")):
        return place
    return os.path.join(folder, place)


_KEYS: Mapping[str, str] = {
    "folders": "a list of folders, URLs or patterns",
    "depth": "a whole number",
    "keep_bytes": 'a size, such as "2TB"',
    "settings": "a table of settings",
    "runs": 'tables of settings by pattern, such as [runs."exp-*"]',
}


def _what_is_wrong(error: msgspec.ValidationError) -> str:
    unknown = re.search(r"unknown field `(.*?)`", str(error))
    if unknown and unknown[1] == "match":
        return "a fleet file has no key match any more: write its patterns into `folders`, such as /data/runs/exp-*"
    if unknown:
        return f"there is no key {unknown[1]!r} in a fleet file: it has {', '.join(_KEYS)}"
    place = re.search(r"at `\$\.(\w+)", str(error))
    return f"{place[1]} must be {_KEYS[place[1]]}" if place and place[1] in _KEYS else "it does not have the right form"
