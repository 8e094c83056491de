"""What a file system needs to be told besides its URL: endpoints, keys, timeouts. Set by the doors, once.

Options come from ``[storage]`` in ``ckptguard.toml``; below them fsspec's own configuration and each library's own
files and variables stay in force. They are kept in this process alone: no record, log or message holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptguard.storage.redaction import secrets_in

_options: dict[str, dict[str, Any]] = {}
_secrets: frozenset[str] = frozenset()


def use_options(options: Mapping[str, Mapping[str, Any]]) -> None:
    """From now on, open URLs with these options: by protocol (``s3``) or by the beginning of a URL (``s3://bucket``).
    They replace what was set before under the same name."""
    global _options, _secrets
    _options = {**_options, **{name.rstrip("/"): dict(values) for name, values in options.items()}}
    _secrets = secrets_in(_options)


def options_for(url: str) -> dict[str, Any]:
    """The options for a URL: its protocol's, then those of every beginning of it, the longer ones winning."""
    protocol = url.partition(":")[0]
    found = dict(_options.get(protocol, {}))
    for name in sorted(_options, key=len):
        if "://" in name and (url == name or url.startswith(f"{name}/")):
            found.update(_options[name])
    return found


def known_secrets() -> frozenset[str]:
    """The secrets among the options, to keep them out of messages."""
    return _secrets
