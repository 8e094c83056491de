"""Read a name: its step, and whether a file is one shard or rank of several."""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptguard.formats.suffixes import suffixes_of
from ckptguard.values.ids import MAX_STEP, Step, single_number, step_of_numbers

_STEP = re.compile(r"(?:^|[^a-z])(?:global_?step|step|iter(?:ation)?)[-_=.]?(\d+)", re.IGNORECASE)
_EPOCH = re.compile(r"(?:^|[^a-z])(?:epoch|ep)[-_=.]?(\d+)", re.IGNORECASE)
_COUNTED = re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt|epoch|ep|it)[-_=.+]?(\d+)", re.IGNORECASE)
_TRAILING = re.compile(r"(?:^|[-_]|(?<!\d)\.)(\d+)$")  # not the decimals of loss=0.35
_DECIMAL = re.compile(r"\d+\.\d+")
_NUMBER = re.compile(  # alone, or after a counting word; neither the digits of a hash nor those of "exp2"
    r"(?<![a-z0-9])(?:checkpoint|ckpt|epoch|ep|it|batch)?(\d+)(?![a-z0-9])", re.IGNORECASE
)
_PART = re.compile(
    r"-\d+-of-\d+\.|(?:^|_)mp_rank_\d+|zero_pp_rank_\d+|^__\d+_\d+|rank[-_]?\d+|^(?:rng_state|random_states|custom_checkpoint)_\d+"
    r"|^(?:optimizer|scheduler|sampler|dl_state_dict)_\d+\.bin$"
    r"|^layer_\d+-model_|^(?:pytorch_model(?:_fsdp)?|optimizer)_\d+$|^shard[-_]\d+"
)
_MODEL = re.compile(r"((?:model|pytorch_model))_(\d+)(\.(?:safetensors|bin))")


def is_part(name: str, around: Collection[str] = ()) -> bool:
    """True if a name's digits are those of a shard or a rank, not a step. `around` are the names beside it.

    ``model_1.safetensors`` is Accelerate's second model if ``model.safetensors`` exists, too; otherwise it is a save.
    """
    if _PART.search(name) is not None:
        return True
    model = _MODEL.fullmatch(name)
    return model is not None and model[1] + model[3] in around


def step_from_name(name: str, around: Collection[str] = ()) -> Step:
    """Return the step in a file or folder name: ``step-500``, ``checkpoint-500``, ``epoch=0-step=2.ckpt``,
    ``net-500.pth``.

    None if it has none. A number after a word for step is the step, else the last one after a counting word. Otherwise
    all numbers count, in their order: fairseq's ``checkpoint_1_500.pt`` is (1, 500), update 500 in epoch 1.
    """
    if is_part(name, around):
        return None
    stem = _stem(name)
    if steps := _STEP.findall(stem):
        return _small((steps[-1],))
    counted = [*_COUNTED.finditer(stem)]
    found = counted or [*_TRAILING.finditer(stem)]
    if not found:
        return None
    numbers = _NUMBER.findall(_DECIMAL.sub("", stem))
    if len(numbers) > 1 and not (counted and counted[-1].end() == len(stem)):
        return _small(tuple(numbers))
    return _small((found[-1][1],))


def counts_steps(name: str) -> bool:
    """True if a word in the name says what it counts (``step_5``, ``checkpoint-5``, ``epoch_5``), or it is a bare
    number.

    A number after another word (``lora-8``) may be anything.
    """
    if is_part(name):
        return False
    return name.isdigit() or counts_by_word(name)


def counts_by_word(name: str) -> bool:
    """True if a word in the name says what it counts."""
    return not is_part(name) and (_STEP.search(name) is not None or _COUNTED.search(name) is not None)


def counter_in_name(name: str) -> tuple[str, int] | None:
    """Return what a word in the name says that it counts, and the number: ``("epoch in its name", 3)``."""
    number, stem = single_number(step_from_name(name)), _stem(name)
    what = "step" if _STEP.search(stem) else "epoch" if _EPOCH.search(stem) else None
    return None if number is None or what is None else (f"{what} in its name", number)


def _stem(name: str) -> str:
    return name.removesuffix(next((s for s in suffixes_of("tensors", "arrays") if name.endswith(s)), ""))


def _small(digits: tuple[str, ...]) -> Step:
    numbers = tuple(int(number[:20]) for number in digits)
    return step_of_numbers(numbers) if all(number <= MAX_STEP for number in numbers) else None
