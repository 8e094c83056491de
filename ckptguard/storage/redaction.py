"""Secrets in URLs and in other people's messages: refused in the former, blotted out in the latter."""

from __future__ import annotations

import re

from ckptguard.errors import SettingsError

# The patterns are compiled when first used: most commands meet neither a URL nor an error.
_HIDDEN = "***"
_NAME = (
    r"(?:[\w.-]*(?:secret|passw|passphrase|token|signature|credential|authorization|connection_?string"
    r"|account_?key|access_?key|api_?key)[\w.-]*|sig|key|pwd)"
)
_USER = r"(?<=://)[^/?#\s]*:[^/?#\s]*@"
# A password with a slash or question mark in it, as keys of S3 may have: after a host's colon stands but a port.
_LONG_USER = r"(?P<scheme>[\w+.-]+://)(?!arn:|.*::)[^/?#@\[\]]*:(?!\d*/)[^@]*@"
_BEARER = r"(?i)\b(Bearer|Basic|AWS4-HMAC-SHA256|SharedKey)\s+[^\s'\",;]+"
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[^\s&;,'\"<>)\]}]+)"
_PAIR = rf"(?i)(?P<name>['\"]?\b{_NAME}['\"]?\s*[=:]\s*){_VALUE}"
_ELEMENT = rf"(?i)<(?P<name>{_NAME})>[^<]*<"
_SECRET_OPTION = rf"(?i){_NAME}"
_SHORTEST = 4  # blotting out every "a" of a message because somebody's password is "a" helps nobody


# The secrets of all storages that were opened, to be kept out of messages. They open nothing from here.
_known: set[str] = set()


def keep_out(secrets: frozenset[str]) -> None:
    """From now on, blot these out of every message of this process, whichever storage it is about."""
    _known.update(secrets)


def redacted(text: str) -> str:
    """The text without what looks like a secret, nor any secret that a storage was opened with."""
    for secret in sorted(_known.copy(), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    text = re.sub(_USER, f"{_HIDDEN}@", text)
    text = re.sub(_BEARER, lambda match: f"{match[1]} {_HIDDEN}", text)
    text = re.sub(_PAIR, lambda match: f"{match['name']}{_HIDDEN}", text)
    return re.sub(_ELEMENT, lambda match: f"<{match['name']}>{_HIDDEN}<", text)


def refuse_secrets(url: str) -> None:
    """SettingsError for a URL that holds a password or a signed query: it would end up in records and logs."""
    from urllib.parse import unquote  # a local path has no use for it

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
    """The values among storage options that are secrets, by the names of their options, at any depth."""
    if isinstance(options, dict):
        return frozenset().union(*(secrets_in(value, str(key)) for key, value in options.items()))
    if isinstance(options, list | tuple):
        return frozenset().union(*(secrets_in(value, name) for value in options))
    if isinstance(options, str) and len(options) >= _SHORTEST and re.fullmatch(_SECRET_OPTION, name):
        return frozenset({options})
    return frozenset()


def plain_url(url: str) -> str:
    """A URL without user, password and query, as a record can hold it: a path need not be UTF-8."""
    url = url.encode("utf-8", "backslashreplace").decode()
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
