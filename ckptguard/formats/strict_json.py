"""Strict parsing of JSON from files: what two parsers could read differently is an error."""

from __future__ import annotations

import json
from typing import NoReturn

from ckptguard.formats.structure import ReadProblem
from ckptguard.storage.protocol import Reader


class JsonProblem(ReadProblem):
    """The text is not the JSON that it should be."""


def parse_object(text: bytes, *, allow_nan: bool = False) -> dict[str, object]:
    """Return the JSON object in `text`. JsonProblem for anything else, for duplicate keys and for invalid Unicode.

    `allow_nan` accepts the bare words NaN and Infinity, which Python's own writer produces.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonProblem("it is not UTF-8") from error
    try:
        integers = _integer if "-0" in decoded else None  # only then, because our own hook takes time
        value = json.loads(
            decoded, object_pairs_hook=_unique, parse_constant=None if allow_nan else _refuse, parse_int=integers
        )
        if "\\ud" in decoded or "\\uD" in decoded:  # perhaps one without its other half
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except JsonProblem:
        raise
    except UnicodeEncodeError as error:
        raise JsonProblem("it holds a lone surrogate") from error
    except RecursionError as error:
        raise JsonProblem("it is nested too deeply") from error
    except ValueError as error:
        raise JsonProblem(why_unread(error), ends_early=_ends_early(error)) from error
    if not isinstance(value, dict):
        raise JsonProblem("it is not an object")
    return value


def read_object(reader: Reader, most: int, *, allow_nan: bool = False) -> dict[str, object]:
    """Do the same for a whole file. JsonProblem also if it is empty or has more than `most` bytes."""
    size = reader.entry.size
    if not size:
        raise JsonProblem("it is empty", ends_early=True)
    if size > most:
        raise JsonProblem(f"{size} bytes, more than ckptguard reads", too_large=True)
    return parse_object(reader.read(0, size), allow_nan=allow_nan)


def why_unread(error: ValueError) -> str:
    """Return why Python's json did not parse a text, in words for people: of long numbers it speaks of its own
    limits."""
    return str(error)[:200] if isinstance(error, json.JSONDecodeError) else "a number in it has too many digits"


def _ends_early(error: ValueError) -> bool:
    """True if the parser ran out of text, perhaps in the middle of a word such as "false"."""
    if not isinstance(error, json.JSONDecodeError) or error.msg.startswith("Extra data"):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip()) - len("-Infinit")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonProblem(f"the key {printable(twice)!r} is there twice")
    return found


def _refuse(word: str) -> NoReturn:
    raise JsonProblem(f"{word} is not JSON")


def _integer(text: str) -> int:
    if text == "-0":
        raise JsonProblem("-0 is a float to some parsers and an integer to others")
    return int(text)


def printable(text: str, limit: int = 200) -> str:
    """Shorten text from a file, with valid Unicode, for our own JSON."""
    if len(text) > limit:
        text = text[:limit] + "..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
