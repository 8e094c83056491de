"""What goes to the process of a call, and what comes back."""

from __future__ import annotations

import msgspec

# A hostile file may make a plugin say much, and all of it comes into our memory.
MOST_VALUES = 100_000  # that a check or a layout returns
MOST_TENSORS = 1_000_000  # of a file
MOST_SENTENCES = 1000  # about a file


class PluginCall(msgspec.Struct, frozen=True):
    """The kind, the place of the function, and its argument."""

    kind: str
    entry: str
    argument: msgspec.Raw


class PluginAnswer(msgspec.Struct, frozen=True):
    """What the plugin returned, or why there is nothing."""

    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: str = ""
