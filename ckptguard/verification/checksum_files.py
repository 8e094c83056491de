"""Checksum files in the styles of md5sum, sha256sum, shasum, b2sum, b3sum and openssl, and where they apply.

A stated path is only ever compared with names that storage listed: nothing is opened because a list names it.
"""

from __future__ import annotations

import codecs
import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ckptguard.errors import NotFoundError, SettingsError, StorageError
from ckptguard.storage import normalise_url, open_storage
from ckptguard.values.ids import escape
from ckptguard.values.storage_options import NO_OPTIONS, StorageOptions

Stated = Mapping[str, str]  # algorithm -> lower-case hex digest
Sums = Mapping[str, Stated]  # by the path as stated ("": the list names no file)

LONGEST = 16 << 20
_MOST_ODD = 10_000  # a list has headings and remarks, but not as many: what has more is something else
_HEX = r"(?P<digest>[0-9a-fA-F]{32,128})"
_GNU = re.compile(rf"{_HEX}(?: [ *]| (?![ *]))(?P<path>.+)", re.DOTALL)
_BSD = re.compile(rf"(?P<algorithm>[A-Za-z0-9/-]+) ?\((?P<path>.+)\) ?= ?{_HEX}", re.DOTALL)
_ALONE = re.compile(_HEX)
_ESCAPE = re.compile(r"\\(.?)", re.DOTALL)
_ESCAPED = {"\\": "\\", "n": "\n", "r": "\r"}
# Digits of a digest, and what a list's own name says, where its lines do not: B3SUMS, model.sha512.
_ALGORITHMS = {
    "md5": (32, "md5"),
    "sha1": (40, "sha-?1"),
    "sha224": (56, "sha-?224"),
    "sha256": (64, "sha-?256"),
    "blake3": (64, "b3|blake3"),
    "blake2b-256": (64, "b2|blake2"),
    "sha384": (96, "sha-?384"),
    "blake2b-384": (96, "b2|blake2"),
    "sha512": (128, "sha-?512"),
    "blake2b": (128, "b2|blake2"),
}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class CheckSums(msgspec.Struct, frozen=True):
    """A checksum file that was read: what it states, the local folder that it lies in ("" where it has none), and its
    name."""

    stated: Sums
    folder: str
    name: str


def read_check_sums(path: str, options: StorageOptions = NO_OPTIONS) -> CheckSums:
    """Read a checksum file that the user named, by a link too. SettingsError if it cannot be read or understood."""
    place = normalise_url(path)
    local = "://" not in place
    folder, _, name = (os.path.realpath(place) if local else place).rpartition("/")
    try:
        with open_storage(folder or "/", options=options).open(name) as reader:
            if reader.entry.size > LONGEST:
                raise SettingsError(f"{escape(path)} is too large for a checksum file")
            text = reader.read(0, reader.entry.size)
    except (NotFoundError, StorageError) as error:
        raise SettingsError(f"the checksum file {escape(path)} cannot be read: {error.message}") from error
    # The folder is that of the name: a link into a cache lies beside what it lists, the blob does not.
    around = os.path.realpath(os.path.dirname(place)) if local else ""
    return CheckSums(stated=parse_check_sums(text, path), folder=around, name=os.path.basename(place))


def parse_check_sums(text: bytes | str, source: str, odd: list[str] | None = None) -> dict[str, Stated]:
    """Return all sums of each path. SettingsError names the line that is in none of the styles, that
    may be of several algorithms, or that contradicts another one. With `odd` only the last is an error, and very
    many lines: that list gets a sentence for each line that was not understood."""
    sums: dict[str, dict[str, str]] = {}
    for number, line in enumerate(_lines(text, source), 1):
        if not line.strip() or line.startswith(("#", ";")):
            continue
        where = f"{escape(source)}, line {number}"
        try:
            path, algorithm, digest = _stated(line, where, source)
        except SettingsError as error:
            if odd is None:
                raise
            if len(odd) == _MOST_ODD:
                raise SettingsError(f"{where}: {_MOST_ODD:,} lines before were not understood either") from error
            odd.append(error.message)
            continue
        if sums.setdefault(path, {}).setdefault(algorithm, digest) != digest:
            raise SettingsError(f"{where}: another {algorithm} for {escape(path[:80])} than in a line before")
    if not sums and odd is None:
        raise SettingsError(f"{escape(source)} states no checksums")
    return dict(sums)


def sums_for(sums: Sums, prefix: str, files: Sequence[str], *, root: str = "", folder: str = "") -> dict[str, Stated]:
    """The stated sums as keys of the storage, for the target `prefix` with these files.

    Paths are relative to the list's own folder, to the target, or to the folder around it (``md5sum model/*``):
    whichever fits most files. Every stated file inside the target counts, also a missing one; others do not. For a
    target that is one file its bare name is enough. `root` is the storage's local path and `folder` the list's, where
    known. SettingsError if the list says nothing about the target, or two things about one file.
    """
    prefix = "" if prefix == "." else prefix
    if prefix in files:
        return {prefix: _for_one_file(sums, prefix, root, folder)}
    fitting = fitting_sums(sums, prefix, files, root=root, folder=folder)
    if not fitting:
        raise SettingsError(f"the checksum file names no file of {escape(prefix.rpartition('/')[2] or 'the target')}")
    return fitting


def fitting_sums(sums: Sums, prefix: str, files: Sequence[str], *, root: str, folder: str) -> dict[str, Stated]:
    """The same for a folder; nothing where the list says nothing about it."""
    present, most = set(files), 0
    fitting: dict[str, list[Stated]] = {}
    for base in _bases(prefix, root, folder):
        inside: dict[str, list[Stated]] = {}
        for path, stated in sums.items():
            key = _key(base, path, root)
            if key in present or (key.startswith(prefix + "/") if prefix else key):
                inside.setdefault(key, []).append(stated)
        fits = len(present & inside.keys())
        if fits > most:
            fitting, most = inside, fits
    return {key: _together(stated, key) for key, stated in fitting.items()}


def _together(several: Iterable[Stated], key: str) -> Stated:
    """All sums of a file that a list names by several paths. SettingsError if two of one algorithm differ."""
    found: dict[str, str] = {}
    for stated in several:
        for algorithm, digest in stated.items():
            if found.setdefault(algorithm, digest) != digest:
                raise SettingsError(f"the checksum file states two different {algorithm} for {escape(key)}")
    return found


def _for_one_file(sums: Sums, key: str, root: str, folder: str) -> Stated:
    for base in _bases(key, root, folder):
        exact = [stated for path, stated in sums.items() if path and _key(base, path, root) == key]
        if exact:
            return _together(exact, key)
    name = key.rpartition("/")[2]
    named = [stated for path, stated in sums.items() if path.rpartition("/")[2] == name]
    if not named and set(sums) == {""}:
        return sums[""]
    if any(stated != named[0] for stated in named) or not named:
        what = "sums of several files of the name" if named else "no sum for"
        raise SettingsError(f"the checksum file states {what} {escape(name)}")
    return named[0]


def _bases(prefix: str, root: str, folder: str) -> list[str]:
    """The folders that stated paths may be relative to, as ways from the storage's root."""
    own = [posixpath.relpath(folder, root)] if root.startswith("/") and folder.startswith("/") else []
    return list(dict.fromkeys([*own, prefix, prefix.rpartition("/")[0]]))


def _key(base: str, path: str, root: str) -> str:
    """The key that a stated path means; "" for one outside the storage."""
    if root.startswith("/") and path:
        key = posixpath.relpath(posixpath.join(root, base, path), root)
    else:
        key = posixpath.normpath(posixpath.join(base, path)) if path and not path.startswith("/") else ""
    return "" if key in (".", "..") or key.startswith("../") else key


def _lines(text: bytes | str, source: str) -> list[str]:
    if isinstance(text, bytes):
        try:
            # PowerShell's redirection writes UTF-16; both byte order marks name their encoding.
            text = text.decode("utf-16" if text.startswith(_UTF16) else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise SettingsError(f"{escape(source)} is not text in UTF-8") from error
    # Not splitlines: a name may hold what Unicode calls a line's end. With NUL (--zero) names stand as they are.
    return text.split("\0") if "\0" in text else [line.removesuffix("\r") for line in text.split("\n")]


def _stated(line: str, where: str, source: str) -> tuple[str, str, str]:
    """(path, algorithm, digest) of one line."""
    escaped = line.startswith("\\")
    plain = line[1:] if escaped else line
    match = _GNU.fullmatch(plain) or _BSD.fullmatch(plain) or _ALONE.fullmatch(plain.strip())
    if match is None:
        raise SettingsError(f"{where}: neither md5sum's nor sha256sum's style: {escape(line[:80])}")
    parts = match.groupdict()
    path, digest = parts.get("path", ""), parts["digest"].lower()
    path = _unescaped(path, where) if escaped else path
    algorithm = _algorithm(parts.get("algorithm", ""), digest, where, source)
    return ("" if path == "-" else path.removeprefix("./")), algorithm, digest


def _unescaped(path: str, where: str) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1] not in _ESCAPED:
            raise SettingsError(f"{where}: an escape that no tool writes: {escape(match[0])}")
        return _ESCAPED[match[1]]

    return _ESCAPE.sub(one, path)


def _algorithm(tag: str, digest: str, where: str, source: str) -> str:
    """The algorithm that a line's tag states, else the list's own name, else the digest's length."""
    possible = [name for name, (digits, _) in _ALGORITHMS.items() if digits == len(digest)]
    if tag:
        word = re.sub(r"^sha2-(?=\d{3}$)|^sha-", "sha", tag.lower())  # openssl's SHA2-256
        found = [name for name in possible if word in (name, f"{name}-512")]
    else:
        found = [name for name in possible if re.search(_ALGORITHMS[name][1], os.path.basename(source).lower())]
        found = found or (possible[:1] if len(digest) < 128 else possible)
    if len(found) != 1:
        what = f"a digest of {len(digest)} digits may be {' or '.join(possible)}"
        if tag or not found:
            what = f"{escape(tag)} of {len(digest)} digits is no digest known here"
        raise SettingsError(f"{where}: {what}", hint="say which in the list: `sha512sum --tag`, `b2sum --tag`")
    return found[0]
