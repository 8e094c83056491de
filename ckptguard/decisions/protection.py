"""The answer to "am I protected?", in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class GoodCheckpoint(msgspec.Struct, frozen=True):
    """A good checkpoint: its name for people, and how its copy was made: link, reflink or copy. "": it has none."""

    name: str
    copy: str


def own_copy(good: Sequence[GoodCheckpoint]) -> int | None:
    """Return the first of some checkpoints whose copy shares no bytes with its file, or None."""
    return next((number for number, one in enumerate(good) if one.copy not in ("", "link")), None)


def explain(good: Sequence[GoodCheckpoint], keep: str) -> str:
    """Return the sentence. `good` is the known-good checkpoint and the good ones of its series before it, the newest
    first; `keep` is the setting."""
    if not good:
        return "no: there is no known-good checkpoint to go back to"
    own, newest = own_copy(good), good[0]
    if own == 0:
        return f"yes: {newest.name} is known good and has an independent copy ({newest.copy})"
    if own is not None:
        lost = f"{own} saves" if own > 1 else "1 save"
        return f"yes: saving over {newest.name} would lose {lost}; {good[own].name} has an independent copy"
    if not newest.copy:
        return f"partly: {newest.name} is known good, but has no copy: rotation or damage can take it"
    why = ' (keep = "link")' if keep == "link" else ""
    survives = "survives rotation, but not saving over it: its copy is a hard link"
    return f"partly: {newest.name} is known good and {survives}{why}"
