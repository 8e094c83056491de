"""WeNet's flat folder: ``epoch_3.pt`` holds the weights, and ``epoch_3.yaml`` what else a resume needs.

The ``.yaml`` is written last, and twice. With DeepSpeed 0.15.3 and later ``epoch_3.pt`` is a folder.
Source: wenet/utils/checkpoint.py and train_utils.py at 0154699.
"""

from __future__ import annotations

import re

from ckptguard.layouts.checkpoint import Checkpoint, Gap, Layout, Structures
from ckptguard.layouts.plain_folder import holds_state

_NAME = re.compile(r"(?:epoch_\d+|step_\d+|\d+|init)\.pt")


def _beside(name: str) -> str:
    return name.removesuffix(".pt") + ".yaml"


def _is_one(name: str, around: frozenset[str]) -> bool:
    return _NAME.fullmatch(name) is not None and not around.isdisjoint((_beside(name), "train.yaml"))


def _gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    gaps = []
    if not any(holds_state(key) for key in checkpoint.files):
        gaps.append(Gap("there are no weights", checkpoint.path))
    yaml = _beside(checkpoint.path)
    if yaml not in checkpoint.files:
        gaps.append(Gap("missing; WeNet writes it last, and a resume needs it", yaml))
    elif yaml in structures:
        stated = {leaf.name: leaf.value for leaf in structures[yaml].leaves}
        if not any(e.size for e in checkpoint.entries if e.key == yaml):
            gaps.append(Gap("it is empty", yaml))
        elif structures[yaml].metadata.get("ends") == "early":
            gaps.append(Gap("it ends in the middle of a line", yaml))
        elif not stated:
            gaps.append(Gap("it states neither step nor epoch", yaml, fatal=False))
        for word in ("step", "epoch"):
            named = checkpoint.path.rpartition("/")[2].startswith(f"{word}_")
            if named and word in stated and stated[word] != checkpoint.step:
                gaps.append(Gap(f"it states {word} {stated[word]}", yaml, fatal=False))
    return gaps


LAYOUT = Layout(
    name="wenet",
    gaps=_gaps,
    accepts=lambda folder: bool(folder.files) and _is_one(folder.name, folder.around),
    accepts_file=_is_one,
    companions=lambda name, around: (_beside(name),),
    last_written=_beside,
)
