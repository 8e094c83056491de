"""Secrets in URLs and in foreign messages: refused in the former, replaced in the latter."""

from __future__ import annotations

import re

from ckptguard.errors import SettingsError

# The patterns are compiled when first used, because most commands have neither a URL nor an error.
_HIDDEN = "***"
_NAME = (
    r"(?:[\w.-]*(?:secret|passw|passphrase|token|signature|credential|authorization|connection_?string"
    r"|account_?key|access_?key|api_?key)[\w.-]*|sig|key|pwd)"
)
_USER = r"(?<=://)[^/?#\s]*:[^/?#\s]*@"
# A password with a slash or question mark, as S3 keys may have: only a port follows a host's colon.
_LONG_USER = r"(?P<scheme>[\w+.-]+://)(?!arn:|.*::)[^/?#@\[\]]*:(?!\d*/)[^@]*@"
_BEARER = r"(?i)\b(Bearer|Basic|AWS4-HMAC-SHA256|SharedKey)\s+[^\s'\",;]+"
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[^\s&;,'\"<>)\]}]+)"
_PAIR = rf"(?i)(?P<name>['\"]?\b{_NAME}['\"]?\s*[=:]\s*){_VALUE}"
_ELEMENT = rf"(?i)<(?P<name>{_NAME})>[^<]*<"
_SECRET_OPTION = rf"(?i){_NAME}"
_SHORTEST = 4  # replacing every "a" of a message because a password is "a" helps nobody


# The secrets of all opened storages, to keep them out of messages. They open nothing from here.
_known: set[str] = set()


def keep_out(secrets: frozenset[str]) -> None:
    """From now on, replace these in every message of this process, for every storage."""
    _known.update(secrets)


def redacted(text: str) -> str:
    """Return the text without anything that looks like a secret, and without the secrets of opened storages."""
    for secret in sorted(_known.copy(), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    text = re.sub(_USER, f"{_HIDDEN}@", text)
    text = re.sub(_BEARER, lambda match: f"{match[1]} {_HIDDEN}", text)
    text = re.sub(_PAIR, lambda match: f"{match['name']}{_HIDDEN}", text)
    return re.sub(_ELEMENT, lambda match: f"<{match['name']}>{_HIDDEN}<", text)


def refuse_secrets(url: str) -> None:
    """Raise SettingsError for a URL with a password or a signed query: it would end up in records and logs."""
    from urllib.parse import unquote  # a local path does not need it

    place, _, query = url.partition("?")
    userinfo = place.partition("://")[2].partition("/")[0].rpartition("@")[0]
    signed = any(
        re.fullmatch(_SECRET_OPTION, unquote(pair.partition("=")[0])) for pair in query.split("&") if "=" in pair
    )
    shown = re.sub(_LONG_USER, lambda match: f"{match['scheme']}{_HIDDEN}@", url)
    if ":" in userinfo or signed or shown != url:
        raise SettingsError(
            f"the URL {redacted(shown)} holds a secret, which would end up in records and logs",
            hint="put it under [storage] in ckptguard.toml, or into fsspec's own configuration",
        )


def secrets_in(options: object, name: str = "") -> frozenset[str]:
    """Return the secret values in storage options at any depth, by the names of the options."""
    if isinstance(options, dict):
        return frozenset().union(*(secrets_in(value, str(key)) for key, value in options.items()))
    if isinstance(options, list | tuple):
        return frozenset().union(*(secrets_in(value, name) for value in options))
    if isinstance(options, str) and len(options) >= _SHORTEST and re.fullmatch(_SECRET_OPTION, name):
        return frozenset({options})
    return frozenset()


def plain_url(url: str) -> str:
    """Return a URL without user, password and query, in UTF-8 for a record: a path may have other bytes."""
    url = url.encode("utf-8", "backslashreplace").decode()
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
