"""Read a name: its step, and whether a file is one shard or rank of several."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache

import msgspec

from ckptguard.decisions.names import NameReading, read_names
from ckptguard.formats.table import suffixes_of
from ckptguard.values.ids import MAX_STEP, OF_TRAINING, Step, single_number, step_of_numbers

_STEP = re.compile(r"(?:^|[^a-z])(?:global_?step|step|iter(?:ation)?)[-_=.]?(\d+)", re.IGNORECASE)
_EPOCH = re.compile(r"(?:^|[^a-z])(?:epoch|ep)[-_=.]?(\d+)", re.IGNORECASE)
_COUNTED = re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt|epoch|ep|it)[-_=.+]?(\d+)", re.IGNORECASE)
_TRAILING = re.compile(r"(?:^|[-_]|(?<!\d)\.)(\d+)$")  # not the decimals of loss=0.35
OWN_SUFFIX = re.compile(r"\.[A-Za-z_]\w*$")  # of a trainer: ``700.state``
_DIGIT = re.compile(r"[0-9]")
_DECIMAL = re.compile(r"\d+\.\d+")
_NUMBER = re.compile(  # alone, or after a counting word; neither the digits of a hash nor those of "exp2"
    r"(?<![a-z0-9])(?:checkpoint|ckpt|epoch|ep|it|batch)?(\d+)(?![a-z0-9])", re.IGNORECASE
)
_PART = re.compile(
    r"-\d+-of-\d+\.|(?:^|_)mp_rank_\d+|zero_pp_rank_\d+|^__\d+_\d+|rank[-_]?\d+|^(?:rng_state|random_states|custom_checkpoint)_\d+"
    r"|^(?:optimizer|scheduler|sampler|dl_state_dict)_\d+\.bin$"
    r"|^layer_\d+-model_|^(?:pytorch_model(?:_fsdp)?|optimizer)_\d+$|^shard[-_]\d+"
)
_OF_RANK = re.compile(_PART.pattern + r"|[-_.]shard[-_]?\d+")
_FINE_WORDS = ("step", "iteration", "update", "batch")
_MODEL = re.compile(r"((?:model|pytorch_model))_(\d+)(\.(?:safetensors|bin))")


class SaveByRank(msgspec.Struct, frozen=True):
    """A save of one file for each rank, all in one folder: its step, and their names in the order of the ranks."""

    step: Step
    names: tuple[str, ...]


def may_be_of_rank(name: str) -> bool:
    """True if a name may be one of several that are one save. The names beside it then decide."""
    return _OF_RANK.search(name) is not None


def save_by_rank(name: str, around: Collection[str] = ()) -> SaveByRank | None:
    """Return the save that a file of one rank belongs to, from its name and those beside it.

    None if its name states no step: ``model_0000099.rank_0.pth`` is of save 99, ``rank_0.pth`` of the folder.
    """
    if not may_be_of_rank(name):
        return None
    names = around if isinstance(around, frozenset) and name in around else frozenset((*around, name))
    return saves_by_rank(names).get(name)


@lru_cache(maxsize=32)
def saves_by_rank(names: frozenset[str], on_record: frozenset[str] = frozenset()) -> Mapping[str, SaveByRank]:
    """Return the saves that files of ranks belong to, of all names in a folder. Those that are `on_record` were
    read so before, and keep this reading when the names that confirmed it are gone."""
    confirming = {_next_save(name) for name in on_record}
    readings = read_names(name for name in sorted(names | confirming) if may_be_of_rank(name))
    saves: dict[tuple[str, Step], list[tuple[int, str]]] = {}
    for name in sorted(names & readings.keys()):
        reading = readings[name]
        if reading.part is not None and reading.step is not None and _is_surely_step(name, reading, readings):
            whole = reading.step if reading.word in _FINE_WORDS else step_of_numbers(reading.order)
            saves.setdefault((reading.series, whole), []).append((reading.part, name))
    found = ((step, tuple(name for _, name in sorted(parts))) for (_, step), parts in saves.items())
    return {name: SaveByRank(step, own) for step, own in found for name in own}


def _next_save(name: str) -> str:
    """Return a file of the same rank whose step is one higher: the step stands before the words for the rank."""
    ranks = _OF_RANK.search(name)
    numbers = [*re.finditer(r"\d+", name[: ranks.start()])] if ranks is not None else []
    if not numbers:
        return name
    start, end = numbers[-1].span()
    return f"{name[:start]}{int(name[start:end][:20]) + 1:0{end - start}d}{name[end:]}"


def _is_surely_step(name: str, reading: NameReading, readings: Mapping[str, NameReading]) -> bool:
    """True if a word or another save confirms the step of a rank's file. A lone ``unet_512_rank0.pt`` does not."""
    if reading.word is not None or _COUNTED.search(name) is not None:
        return True
    if reading.parts is not None:
        return False  # "Large-2407-00001-of-00051" is a model's name
    padded = re.search(rf"(?<!\d)0+{reading.step}(?!\d)", name) is not None and reading.step != 0
    return padded or any(o.series == reading.series and o.step not in (None, reading.step) for o in readings.values())


def is_part(name: str, around: Collection[str] = ()) -> bool:
    """True if a name's digits are only those of a shard or a rank, not a step. `around` are the names beside it.

    ``model_1.safetensors`` is Accelerate's second model if ``model.safetensors`` exists, too; otherwise it is a save.
    """
    if _PART.search(name) is not None:
        return save_by_rank(name, around) is None
    model = _MODEL.fullmatch(name)
    return model is not None and model[1] + model[3] in around


def step_from_name(name: str, around: Collection[str] = (), *, words: bool = True) -> Step:
    """Return the step in a file or folder name: ``step-500``, ``checkpoint-500``, ``epoch=0-step=2.ckpt``,
    ``net-500.pth``.

    None if it has none. A number after a word for step is the step, else the last one after a counting word. Otherwise
    all numbers count, in their order: fairseq's ``checkpoint_1_500.pt`` is (1, 500), update 500 in epoch 1. A name
    without such a number is read by its `words` and zeros: ``model000010.pt``, ``rl_model_128_steps.zip``.
    """
    by_rank = save_by_rank(name, around)
    if by_rank is not None:
        return by_rank.step
    if is_part(name, around):
        return None
    stem = _stem(name)
    if steps := _STEP.findall(stem):
        return _small((steps[-1],))
    counted = [*_COUNTED.finditer(stem)]
    found = counted or [*_TRAILING.finditer(stem)]
    if not found:
        is_known = words and (name != stem or OWN_SUFFIX.search(name) is None)
        return step_in_words(name) if is_known and _DIGIT.search(stem) else None
    numbers = _NUMBER.findall(_DECIMAL.sub("", stem))
    if len(numbers) > 1 and not (counted and counted[-1].end() == len(stem)):
        return _small(tuple(numbers))
    return _small((found[-1][1],))


@lru_cache(maxsize=4096)
def step_in_words(name: str) -> Step:
    """Return the step in a name by its words and zeros, wherever it stands. None for a part and for a time."""
    reading = read_names([name])[name]
    if reading.part is not None or reading.word == "time":
        return None
    is_global = reading.word in _FINE_WORDS and reading.word != "batch"  # batches are often counted in each epoch
    return reading.step if is_global else step_of_numbers(reading.order)


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
    stem = name.removesuffix(next((s for s in suffixes_of("tensors", "arrays") if name.endswith(s)), ""))
    return OF_TRAINING.sub("", stem)


def _small(digits: tuple[str, ...]) -> Step:
    numbers = tuple(int(number[:20]) for number in digits)
    return step_of_numbers(numbers) if all(number <= MAX_STEP for number in numbers) else None
