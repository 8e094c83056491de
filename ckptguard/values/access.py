"""Who may reach the daemon by TCP: roles, and tokens of which only digests are stored."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from enum import IntEnum

import msgspec

from ckptguard.errors import SettingsError

_NAME = re.compile(r"[A-Za-z0-9._@+-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_PATTERNS = 100


class Role(IntEnum):
    """What a caller may do. Each role may do what the ones before it may."""

    READER = 1  # look
    GUARD = 2  # report what a training saw
    OPERATOR = 3  # change runs

    @property
    def word(self) -> str:
        """The role as users write it."""
        return self.name.lower()


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret. `runs` are shell patterns; None means all. `expires`: in seconds since 1970."""

    name: str
    role: Role
    digest: str
    runs: tuple[str, ...] | None = None
    expires: float | None = None

    @property
    def line(self) -> str:
        """Its line in a file of tokens."""
        parts = [self.name, self.role.word, self.digest]
        parts += [] if self.runs is None else [f"runs={','.join(self.runs)}"]
        parts += [] if self.expires is None else [f"expires={self.expires_text}"]
        return " ".join(parts)

    @property
    def expires_text(self) -> str | None:
        """The time from which on it is wrong."""
        return None if self.expires is None else f"{datetime.fromtimestamp(self.expires, UTC):%Y-%m-%dT%H:%M:%SZ}"


def digest_of(secret: str) -> str:
    """Return what stands for a secret in a file. Secrets are long and random, so a plain digest is enough."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def role_named(word: str) -> Role:
    """Return the role of this name. Raises SettingsError."""
    found = next((role for role in Role if role.word == word), None)
    if found is None:
        raise SettingsError(f"there is no role {word[:40]}", hint="the roles are reader, guard and operator")
    return found


def parse_tokens(text: str) -> tuple[Token, ...]:
    """Return the tokens of a file. Raises SettingsError that names the line. It quotes no secret."""
    tokens: dict[str, Token] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            token = _parse_line(words)
            if token.name in tokens or token.digest in {t.digest for t in tokens.values()}:
                raise SettingsError(f"the name {token.name} or its digest is there twice")
        except SettingsError as error:
            raise SettingsError(f"line {number}: {error.message}", hint=error.hint) from error
        tokens[token.name] = token
    return tuple(tokens.values())


def _parse_line(words: list[str]) -> Token:
    if len(words) < 3:
        raise SettingsError("it is not NAME ROLE SHA256", hint="`ckptguard token` writes such a line")
    name, role, digest, *further = words
    check_name(name)
    if not _DIGEST.fullmatch(digest):
        raise SettingsError("the third word is no SHA-256 of 64 hexadecimal digits")
    given: dict[str, str] = {}
    for word in further:
        key, _, value = word.partition("=")
        if key not in ("runs", "expires") or key in given or not value:
            raise SettingsError("after the digest only runs=PATTERN,... and expires=TIME may follow, each once")
        given[key] = value
    runs = parse_patterns(given["runs"].split(",")) if "runs" in given else None
    expires = _parse_time(given["expires"]) if "expires" in given else None
    return Token(name=name, role=role_named(role), digest=digest, runs=runs, expires=expires)


def parse_patterns(patterns: list[str]) -> tuple[str, ...]:
    """Return the patterns. Raises SettingsError if one could not stand in a line."""
    if not all(patterns) or any("," in p or p.split() != [p] for p in patterns) or len(patterns) > _MOST_PATTERNS:
        raise SettingsError(
            f"a token has at most {_MOST_PATTERNS} patterns of runs, none with a space or a comma",
            hint="? stands for any one character",
        )
    return tuple(patterns)


def check_name(name: str) -> str:
    """Return a name that can stand in a line. Raises SettingsError."""
    if not _NAME.fullmatch(name):
        raise SettingsError("a name has 1 to 64 letters, digits and . _ @ + -")
    return name


def _parse_time(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise SettingsError("`expires` is no time", hint="for example 2027-01-31 or 2027-01-31T12:00:00Z") from None
