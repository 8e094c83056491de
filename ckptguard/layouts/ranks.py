"""Files that every rank writes for itself: RNG states and the like, numbered from 0."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Gap
from ckptguard.layouts.deepspeed import stated_world

_OF_RANK = re.compile(r"(?P<stem>rng_state|random_states)_(?P<rank>\d{1,6})\.(?:pth|pkl)")


def rank_gaps(checkpoint: Checkpoint, structures: Mapping[str, Structure]) -> list[Gap]:
    """A warning where RNG states of some ranks are missing: those ranks would resume with other random numbers.

    How many there should be, only a DeepSpeed file beside them states; else the highest rank that is there tells.
    """
    ranks: dict[str, set[int]] = {}
    for key in checkpoint.files:
        match = _OF_RANK.fullmatch(checkpoint.inside(key))
        if match:
            ranks.setdefault(match["stem"], set()).add(int(match["rank"]))
    worlds = [world for s in structures.values() if (world := stated_world(s)) is not None]
    stated = max((data * model for data, model in worlds), default=0)
    gaps = []
    for stem, present in sorted(ranks.items()):
        total = max(stated, max(present) + 1)
        if len(present) < total:
            gaps.append(Gap(message=f"only {len(present)} of {total} ranks have their {stem}", fatal=False))
    return gaps
