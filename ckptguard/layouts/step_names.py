"""What names tell: the step, and whether a file is one shard or rank of several."""

from __future__ import annotations

import re

from ckptguard.formats.suffixes import suffixes_of
from ckptguard.values.ids import MAX_STEP

_STEP = re.compile(r"(?:^|[^a-z])(?:global_?step|step|iter(?:ation)?)[-_=.]?(\d+)", re.IGNORECASE)
_COUNTED = re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt|epoch|ep|it)[-_=.]?(\d+)", re.IGNORECASE)
_TRAILING = re.compile(r"(?:^|[-_]|(?<!\d)\.)(\d+)$")  # not the decimals of loss=0.35
_PART = re.compile(
    r"-\d+-of-\d+\.|(?:^|_)mp_rank_\d+|zero_pp_rank_\d+|^__\d+_\d+|rank[-_]?\d+|^(?:rng_state|random_states|custom_checkpoint)_\d+"
    r"|^(?:model|pytorch_model)_\d+\.(?:safetensors|bin)$|^(?:optimizer|scheduler|sampler|dl_state_dict)_\d+\.bin$"
    r"|^layer_\d+-model_|^(?:pytorch_model(?:_fsdp)?|optimizer)_\d+$|^shard[-_]\d+"
)


def is_part(name: str) -> bool:
    """Whether a name's digits name a shard or a rank instead of a step."""
    return _PART.search(name) is not None


def step_from_name(name: str) -> int | None:
    """The step that a file or folder name states: ``step-500``, ``checkpoint-500``, ``epoch=0-step=2.ckpt``,
    ``net-500.pth``; None where it states none."""
    if is_part(name):
        return None
    suffix = next((s for s in suffixes_of("tensors", "arrays") if name.endswith(s)), "")
    stem = name.removesuffix(suffix)
    for pattern in (_STEP, _COUNTED, _TRAILING):
        found = pattern.findall(stem)
        if found:
            step = int(found[-1][:20])
            return step if step <= MAX_STEP else None
    return None


def counts_steps(name: str) -> bool:
    """Whether a name says by a word what it counts (``step_5``, ``checkpoint-5``, ``epoch_5``), or is a bare number;
    a number at the end of another word (``lora-8``) may be anything."""
    if is_part(name):
        return False
    return name.isdigit() or counts_by_word(name)


def counts_by_word(name: str) -> bool:
    """Whether a name says by a word what it counts."""
    return not is_part(name) and (_STEP.search(name) is not None or _COUNTED.search(name) is not None)
