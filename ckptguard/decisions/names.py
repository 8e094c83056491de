"""Say what each number in the names of a run means: the step, a part of a save, or the name itself. Pure.

A name alone is judged by its words. Names that differ only in numbers are judged together: a number that changes from
save to save is the step, wherever it stands. What stays undecided is a fixed name.
"""

from __future__ import annotations

import calendar
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ckptguard.values.ids import MAX_STEP


class NameReading(msgspec.Struct, frozen=True):
    """What a name says.

    - `series`: the path with ``#`` for the numbers that count. Names of one series differ in their step or part.
    - `step`: the finest number that counts up from save to save, None for a fixed name. `word` says what it counts
      (``step``, ``epoch``, ``batch``), None if the name does not say it.
    - `part`: the number of the rank or shard as the name states it, and `parts` how many there are, if it states that.
    - `order`: all numbers that count, the coarsest first: epoch 2 and batch 50 are (2, 50). Sorts a series.
    """

    series: str
    step: int | None
    word: str | None
    part: int | None
    parts: int | None
    order: tuple[int, ...] = ()


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


# What words before or after a number say about it. Each class has the words by what they count.
_STEPS = {
    "step": "step steps gstep globalstep globalsteps timestep timesteps stp",
    "iteration": "iter iters iteration iterations it its itr itrs",
    "update": "update updates upd upds",
    "batch": "ba batch batches minibatch minibatches",
    "sample": "sample samples image images img imgs nimg kimg examples",
    "token": "token tokens tok tt",
    "frame": "frame frames",
}
_EPOCHS = {
    "epoch": "epoch epochs ep eps epo",
    "round": "round rounds rnd cycle",
    "episode": "episode episodes",
    "generation": "generation gen",
}
_WORDS = {
    word: (rank, kind)
    for rank, table in (("fine", _STEPS), ("coarse", _EPOCHS))
    for kind, words in table.items()
    for word in words.split()
}
COARSE_WORDS = frozenset(_EPOCHS)
_PART_WORDS = _words(
    "rank ranks shard shards part parts worker workers proc process gpu device node host tp pp dp mp partition"
    " slice piece consolidated expert"
)
_AROUND_PARTS = _PART_WORDS | {"model", "local", "global", "world", "size", "zero"}
_TOTAL_WORDS = _words("of world ws worldsize nranks")
_METRIC_WORDS = _words(
    "loss acc accuracy rew reward rewards score miou iou map ap mae mse rmse bleu wer cer psnr ssim fid auc val",
    "valid metric metrics perplexity ppl dice bpb bpc mrr ndcg recall precision prec top kl elbo nll err error",
    "winrate return eer rouge meteor cider spice lpips mcd stoi pesq snr sdr mcc kappa",
)
# Numbers after these are a part of the name: a sweep, a size, a version.
_LABEL_WORDS = _words(
    "seed fold trial version v lr bs wd dim depth layers layer heads hidden fp bf",
    "int bit bits topk resnet vit size res width cfg beta decay gamma lambda alpha dropout temp crop patch copy ave",
    "avg average averaged",
)
_DECIMAL_WORDS = _METRIC_WORDS | _LABEL_WORDS | {"ema", "tau", "momentum", "rate"}
_NEWEST_WORDS = ("latest", "last", "best", "final", "newest")
_SUFFIXES = (
    "pt|pth|bin|ckpt|safetensors|th|pkl|pickle|tar|npz|npy|state|states|model|h5|hdf5|keras|pdparams|pdopt|pdstates"
    "|params|msgpack|joblib|nemo|zip|distcp|ubj|onnx|gguf|torch|net|chkpt|checkpoint|weights|mdl|dat|t7|pyth|optim"
)
_DIGITS_IN_SUFFIX = re.compile(r"\.(?:h5|hdf5|bz2|lz4|7z|mp3|mp4|t7|sha\d+|md5)(?=\.|$)", re.IGNORECASE)
_SUFFIX = re.compile(r"(?:\.(?:[a-z]+|h5|hdf5|bz2|lz4|7z|t7))+$", re.IGNORECASE)
_AFTER_SUFFIX = re.compile(rf"\.(?:{_SUFFIXES})[._-]$", re.IGNORECASE)

_REAL = r"\d+(?:\.\d+)+(?:e[-+]?\d+)?|\d+e[-+]\d+|(?:nan|inf)(?![a-z])"
_NUMBER = re.compile(
    r"(?P<time>(?<!\d)(?:19|20)\d\d[-_.](?:0[1-9]|1[0-2])[-_.](?:[0-2]\d|3[01])"
    r"(?:[-_+T. ]+\d\d[-_:.h]?\d\d(?:[-_:.m]?\d\d)?s?(?:\+\d\d)?)?(?!\d)"
    r"|(?<!\d)(?:19|20)\d{6}[-_T]\d{4}(?:\d\d)?(?!\d))"
    rf"|(?P<real>(?:(?<=[_=\[(])[-+]|(?<=-)-)?(?:{_REAL}))"
    r"|(?P<int>\d+)",
    re.IGNORECASE,
)
_SIGN = re.compile(r"(?:(?<=[_=\[(])[-+]|(?<=-)-)$")
_BEFORE = re.compile(r"(?P<word>[a-z]+)(?P<gap>[-_=.+:@\[( ]{0,2})$", re.IGNORECASE)
_THOUSANDS = re.compile(rf"[km](?=(?:{'|'.join(sorted(_WORDS, key=len, reverse=True))})?(?![a-z]))", re.IGNORECASE)
_AFTER = re.compile(
    rf"(?P<thousands>{_THOUSANDS.pattern})?(?P<gap>[-_. ]?)(?P<word>[a-z]+)?(?P<next>[-_=.]?\d)?", re.IGNORECASE
)
_ORDINAL = re.compile(r"(?:st|nd|rd|th)(?![a-z])", re.IGNORECASE)
_CAMEL = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# Names whose digits are a part's, although no word says so.
_PARTS = re.compile(
    r"^__(\d+)_(\d+)(?=\.)|mp_rank_(\d+)_(\d+)|^layer_(\d+)-model_(\d+)|^(?:rng_state|random_states)_(\d+)(?=\.|$)"
)
# They are a part's only where they count on from 0 or 1: otherwise each is a save.
_LIKELY_PARTS = re.compile(
    r"^(?:custom_checkpoint|optimizer|scheduler|sampler|dl_state_dict)_(\d+)\.(?:bin|pkl)$"
    r"|^(?:pytorch_model(?:_fsdp)?|optimizer)_(\d+)$"
)
_SECOND = re.compile(r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)_(\d+)(\.(?:safetensors|bin))")
_SAVE_WORD = r"(?:checkpoint|ckpt|chkpt|snapshot|save)[-_=.+]?"
_OF_A_SAVE = re.compile(_SAVE_WORD + "$", re.IGNORECASE)
_PLACEHOLDERS = ("2333333",)  # written by RVC and its kin instead of a step when only the newest save is kept
_MOST_RANKS = 64  # a number below is more likely a rank than a step, where both are possible

_COARSE, _FINE, _TIME, _PART = "coarse", "fine", "time", "part"
_TOTAL, _METRIC, _LABEL, _PLAIN = "total", "metric", "label", "plain"


class _Number(NamedTuple):
    """One number in a path: where it stands, and what the words around it say."""

    start: int
    end: int
    text: str
    value: int
    means: str
    word: str | None
    attached: bool  # to a letter before it
    at_end: bool  # nothing but a suffix follows
    in_name: bool  # not in a folder of the path
    alone: bool  # a whole file name but for its suffix, or a whole folder name
    after_suffix: bool

    @property
    def is_padded(self) -> bool:
        """True for a number that is more likely a step than a version or a size."""
        return len(self.text) >= 4 or (self.text[0] == "0" and len(self.text) >= 3)

    @property
    def is_a_save(self) -> bool:
        """True for a wordless number of a folder that is surely a save: ``0000100``, ``checkpoint_5``; not ``5``."""
        return not self.in_name and (self.is_padded or not self.alone)


class _Path(NamedTuple):
    """A path, its numbers, and the template that all paths of its family share."""

    name: str
    numbers: tuple[_Number, ...]
    template: str


class _Meaning(NamedTuple):
    """Which numbers of a path count, from coarse to fine, which are its part, and which belong to the name."""

    counts: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()


def read_names(names: Iterable[str]) -> dict[str, NameReading]:
    """Return what each path of a run's listing says."""
    paths = [_parse(name) for name in names]
    known = {path.name for path in paths}
    families: dict[str, list[_Path]] = {}
    for path in paths:
        families.setdefault(path.template, []).append(path)
    found: dict[str, tuple[_Path, _Meaning]] = {}
    for family in [*families.values()]:
        for members in _by_folder(family):
            meaning = _meaning(members, known)
            found |= {path.name: (path, meaning(path)) for path in members}
    found = _agreeing(found)
    readings = {name: _reading(path, meaning) for name, (path, meaning) in found.items()}
    _join_second_ranks(readings, found)
    _join_many_parts(readings, found)
    return readings


def _parse(path: str) -> _Path:
    folder, slash, name = path.rpartition("/")
    numbers: list[_Number] = []
    start = 0
    for part in folder.split("/") if slash else ():
        every = _numbers(part, start, in_name=False)
        counted = [n for n in every if n.alone or _counts_in_folder(n, part, start)]
        numbers += (n for n in every if n in counted or (counted and n.means == _METRIC))
        start += len(part) + 1
    numbers += _numbers(name, start, in_name=True)
    return _Path(path, tuple(numbers), _blanked(path, numbers))


def _counts_in_folder(number: _Number, folder: str, offset: int) -> bool:
    """True if a number in a folder's name is a step or a part of what lies inside, by its words alone."""
    if number.means in (_COARSE, _FINE, _TIME, _PART, _TOTAL):
        return True
    return number.means == _PLAIN and (
        number.is_padded or _OF_A_SAVE.search(folder, 0, number.start - offset) is not None
    )


def _blanked(path: str, numbers: Iterable[_Number], keep: Sequence[_Number] = ()) -> str:
    """Return a path with ``#`` for its numbers, but for those in `keep`."""
    text, done = "", 0
    for number in numbers:
        if number not in keep:
            blank = (
                "#.#" if number.means == _METRIC and not number.text.isdecimal() else re.sub(r"\d+", "#", number.text)
            )
            text, done = text + path[done : number.start] + blank, number.end
    return text + path[done:]


def _numbers(name: str, offset: int, *, in_name: bool) -> list[_Number]:
    """Return the numbers in one part of a path."""
    skipped = [match.span() for match in _DIGITS_IN_SUFFIX.finditer(name)]
    suffix = _SUFFIX.search(name)
    stem = len(name) - len(suffix[0]) if suffix is not None and in_name else len(name)
    marked = {place for match in _PARTS.finditer(name) for place in _places(match)}
    found: list[_Number] = []
    for match in _NUMBER.finditer(name):
        if any(start <= match.start() < end for start, end in skipped):
            continue
        pieces = [(match.start(), match.end(), match.lastgroup)]
        if match["real"] and (kind := _kind_behind(name, match)) is not None:
            dot = match.start() + match[0].index(".")
            pieces = [(match.start(), dot, "int"), (dot + 1, match.end(), kind)]
        for start, end, kind in pieces:
            one = _number(name, start, end, kind, found[-1] if found else None, offset)
            if start in marked:
                one = one._replace(means=_PART, word=None)
            last = end + (_THOUSANDS.match(name, end) is not None)
            after = _AFTER_SUFFIX.search(name, 0, start) is not None
            found.append(
                one._replace(
                    at_end=last == stem and one.means != _METRIC,
                    in_name=in_name,
                    alone=(start, last) == (0, stem),
                    after_suffix=after,
                )
            )
    return [*_before_parts(name, offset, found)]


def _before_parts(name: str, offset: int, numbers: Sequence[_Number]) -> Iterable[_Number]:
    """Let the number before a rank or a metric be the last one: ``ckpt_500-shard0.pt``, ``weights-05-0.91.pt``."""
    for one, behind in itertools.zip_longest(numbers, numbers[1:]):
        between = name[one.end - offset : behind.start - offset] if behind is not None else ""
        words = set(re.findall(r"[a-z]+", between.lower()))
        is_last = behind is not None and (
            (behind.means in (_PART, _TOTAL) and bool(words) and words <= _AROUND_PARTS)
            or (behind.means == _METRIC and words <= _METRIC_WORDS)
        )
        yield one._replace(at_end=True) if is_last else one


def _places(match: re.Match[str]) -> list[int]:
    return [match.start(n) for n in range(1, len(match.groups()) + 1) if match.start(n) >= 0]


def _kind_behind(name: str, match: re.Match[str]) -> str | None:
    """Return what follows the first point where it divides two numbers: ``ep1.1000`` (an integer), ``.5.0.31`` (a
    decimal). None for one number, as in ``epoch1.5`` and ``loss0.35``."""
    if re.fullmatch(r"\d+\.\d+\.\d+", match[0]) and name[: match.start()].endswith("."):
        return "real"
    before = _BEFORE.search(name, 0, match.start())
    counted = before is not None and _last_word(before["word"]) in _WORDS
    named = before is not None and not before["gap"] and _last_word(before["word"]) not in _DECIMAL_WORDS
    return "int" if (counted or named) and re.fullmatch(r"\d+\.\d{3,}", match[0]) else None


def _last_word(letters: str) -> str:
    """Return the last word of letters that are written together (``globalStep``)."""
    words = _CAMEL.findall(letters)
    lower = letters.lower()
    ends = next((word for word in ("step", "steps", "epoch", "iter", "rank") if lower.endswith(word)), None)
    return lower if lower in _WORDS else ends or (words[-1].lower() if words else lower)


def _number(name: str, start: int, end: int, kind: str | None, last: _Number | None, offset: int) -> _Number:
    text = name[start:end]
    before, after = _BEFORE.search(name, 0, start), _AFTER.match(name, end)
    word = _last_word(before["word"]) if before is not None else ""
    whole = before["word"].lower() if before is not None else ""
    attached = before is not None and not before["gap"]
    means, counted, value = _PLAIN, None, 0
    if kind == "real":
        means = _METRIC
    elif kind == "time":
        means, counted, value = _TIME, "time", _seconds(text)
    else:
        value = int(text[:20])
        behind = after["word"].lower() if after is not None and after["word"] and not after["next"] else ""
        if after is not None and after["thousands"]:
            value *= 1000 if after["thousands"].lower() == "k" else 10**6
        means, counted = _by_words(name[:start].lower(), name[end:].lower(), (whole, word, behind), attached, last)
        if means == _METRIC and (sign := _SIGN.search(name, 0, start)) is not None:
            start = sign.start()
        if value > MAX_STEP and means in (_PLAIN, _COARSE, _FINE):
            means, counted = _LABEL, None
    return _Number(start + offset, end + offset, text, value, means, counted, attached, False, True, False, False)


def _by_words(
    before: str, after: str, words: tuple[str, str, str], attached: bool, last: _Number | None
) -> tuple[str, str | None]:
    """Return what the words around a number say that it means, and what it counts."""
    whole, word, behind = words
    if re.search(r"(?:^|[^a-z])lora[-_]?rank[-_=.]?$", before):
        return _LABEL, None
    if re.search(r"world[-_]?size[-_=.]?$", before):
        return _TOTAL, None
    if re.match(r"[-_]?of[-_]?\d", after):
        return _PART, None
    if _ORDINAL.match(after):
        return _LABEL, None
    for one in (whole, word):
        if one in _WORDS:
            rank, kind = _WORDS[one]
            return (_COARSE if rank == "coarse" else _FINE), kind
        if one in _PART_WORDS:
            return _PART, None
        if one in _TOTAL_WORDS:
            return _TOTAL, None
        if one in _METRIC_WORDS:
            return _METRIC, None
        if one in _LABEL_WORDS:
            return _LABEL, None
    if whole == "e" and attached:
        return _COARSE, "epoch"
    if attached and last is not None and last.means in (_COARSE, _FINE):
        if whole in ("s", "b"):
            return _FINE, "step" if whole == "s" else "batch"
        if whole in ("w", "r"):
            return _PART, None
    if behind in _WORDS:
        rank, kind = _WORDS[behind]
        return (_COARSE if rank == "coarse" else _FINE), kind
    return _PLAIN, None


def _seconds(text: str) -> int:
    """Return a date or time in a name as hundredths of seconds, which sort like it."""
    digits = re.sub(r"\D", "", text).ljust(16, "0")
    fields = [int(digits[:4]), *(int(digits[n : n + 2]) for n in range(4, 14, 2))]
    seconds = calendar.timegm((fields[0], fields[1], max(fields[2], 1), fields[3], fields[4], fields[5]))
    return seconds * 100 + int(digits[14:16])


def _by_folder(family: list[_Path]) -> list[list[_Path]]:
    """Separate paths in numbered folders if the files inside count for themselves.

    ``0/epoch_3.pt`` and ``1/epoch_3.pt`` are of two trainings; ``100/0.pt`` is a part of save 100.
    """
    numbers = family[0].numbers
    bare = [n for n, number in enumerate(numbers) if not number.in_name and number.means == _PLAIN]
    own = [n for n, number in enumerate(numbers) if number.in_name and number.means in (_COARSE, _FINE, _PLAIN)]
    if not bare or not own:
        return [family]
    worded = any(numbers[n].means != _PLAIN for n in own)
    may_hold_parts = all(numbers[n].is_a_save for n in bare) or all(numbers[n].alone for n in own)
    inside: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for path in family:
        key = tuple(path.numbers[n].value for n in bare)
        inside.setdefault(key, set()).add(tuple(path.numbers[n].value for n in own))
    same = len(set().union(*inside.values())) == 1 and len(inside) > 1
    parts = may_hold_parts and all(len(own) == 1 and _counts_on(n for (n,) in values) for values in inside.values())
    if not worded and (parts or same):
        return [family]
    groups: dict[tuple[int, ...], list[_Path]] = {}
    for path in family:
        numbers = tuple(n if m not in bare else n._replace(means=_LABEL) for m, n in enumerate(path.numbers))
        key = tuple(numbers[m].value for m in bare)
        groups.setdefault(key, []).append(path._replace(numbers=numbers))
    return list(groups.values())


def _counts_on(values: Iterable[int]) -> bool:
    """True if numbers count on from 0 or 1, without a hole."""
    every = sorted(set(values))
    return bool(every) and every[0] in (0, 1) and every[-1] - every[0] == len(every) - 1


def _meaning(family: Sequence[_Path], known: set[str]) -> Callable[[_Path], _Meaning]:
    """Return how to read the paths of a family, which differ in nothing but their numbers."""
    first = family[0].numbers
    every = range(len(first))
    varying = [n for n in every if len({path.numbers[n].value for path in family}) > 1]
    parts = [n for n in every if first[n].means == _PART]
    parts += [n for n in every if _is_likely_part(family, n)]
    counts = [n for n in every if first[n].means in (_COARSE, _FINE)]
    plain = [n for n in every if first[n].means == _PLAIN and n not in parts]
    in_folder = [n for n in plain if not first[n].in_name]
    loose = [n for n in plain if n in varying]
    if counts or len(loose) > 1 or in_folder:
        parts += (taken := _grid(family, loose, in_folder))
        loose = [n for n in loose if n not in taken]
    if counts:
        if not any(first[n].means == _FINE for n in counts):
            counts += [n for n in plain if n not in parts and _is_finer(first, n, family)][-1:]
    else:
        counts = [n for n in loose if not first[n].after_suffix or len(loose) == 1] or [
            n for n in every if first[n].means == _TIME and n in varying
        ]
    rest = [n for n in varying if n not in counts and n not in parts and first[n].means in (_PLAIN, _LABEL, _TIME)]
    apart = _tells_apart(family, counts + parts)
    labels = [n for n in rest if apart or first[n].means == _LABEL]

    def read(path: _Path) -> _Meaning:
        own = counts or _alone(path, parts, known)
        ordered = sorted(own, key=lambda n: (path.numbers[n].means == _FINE, n))
        return _Meaning(tuple(ordered), tuple(parts), tuple(labels))

    return read


def _is_likely_part(family: Sequence[_Path], n: int) -> bool:
    """True for ``optimizer_1.bin`` and its kin, if their numbers count on from 0 or 1."""
    path = family[0]
    name = path.name.rpartition("/")[2]
    match = _LIKELY_PARTS.search(name)
    start = len(path.name) - len(name)
    if match is None or path.numbers[n].start - start not in _places(match):
        return False
    return _counts_on(one.numbers[n].value for one in family)


def _grid(family: Sequence[_Path], loose: Sequence[int], in_folder: Sequence[int]) -> list[int]:
    """Return the wordless number that counts on from 0 or 1 within each of several saves: a rank without a word.

    In a folder that is only a number, one save is enough.
    """
    counted_folder = any(one.means in (_COARSE, _FINE) and not one.in_name for one in family[0].numbers)
    for n in reversed(loose):
        if not family[0].numbers[n].in_name:
            continue
        others = [m for m in range(len(family[0].numbers)) if m != n]
        groups: dict[tuple[int, ...], set[int]] = {}
        for path in family:
            groups.setdefault(tuple(path.numbers[m].value for m in others), set()).add(path.numbers[n].value)
        whole = [values for values in groups.values() if len(values) > 1 and _counts_on(values)]
        most = max((max(values) for values in whole), default=-1)
        enough = 1 if in_folder or (counted_folder and family[0].numbers[n].alone) else 2
        if len(whole) >= enough and all(max(values) <= most for values in groups.values()):
            return [n]
    return []


def _is_finer(numbers: Sequence[_Number], n: int, family: Sequence[_Path]) -> bool:
    """True if a wordless number counts within an epoch: ``epoch_1_500.pt``, ``model.pt.ep1.1000``."""
    if not numbers[n].in_name or n == 0 or numbers[n - 1].means != _COARSE:
        return False
    path = family[0].name
    between = path[numbers[n - 1].end : numbers[n].start]
    return numbers[n].at_end and re.fullmatch(rf"[-_.](?:{_SAVE_WORD})?", between, re.IGNORECASE) is not None


def _tells_apart(family: Sequence[_Path], known: Sequence[int]) -> bool:
    """True if several paths have the same step and part: they are of several trainings."""
    seen = {tuple(path.numbers[n].value for n in known) for path in family}
    return len(seen) < len(family)


def _alone(path: _Path, parts: Sequence[int], known: set[str]) -> list[int]:
    """Return the numbers that count in a path whose neighbours say nothing about it."""
    plain = [
        n
        for n, number in enumerate(path.numbers)
        if number.means == _PLAIN and n not in parts and number.text not in _PLACEHOLDERS
    ]
    last = [n for n in plain if _counts_alone(path.numbers[n], path.name, known)]
    folders = [n for n in plain if path.numbers[n].is_a_save]
    if folders:
        return folders[-1:]
    if not last:
        return [n for n, number in enumerate(path.numbers) if number.means == _TIME]
    if len(last) > 1 and not path.numbers[last[-2]].in_name and path.numbers[last[-1]].value < _MOST_RANKS:
        return [last[-2]]  # 100/0.pt
    earlier = [n for n in plain if n < last[-1] and path.numbers[n].in_name and not path.numbers[n].attached]
    return [*earlier, last[-1]]


def _counts_alone(number: _Number, path: str, known: set[str]) -> bool:
    if number.after_suffix:
        return number.value >= _MOST_RANKS and not re.search(r"\d", path[: number.start].rpartition("/")[2])
    if number.at_end or number.alone:
        return not number.attached or number.is_padded
    if number.is_padded:
        return True
    begin, end = path[: number.start], path[number.end :]
    return any(begin + word + end in known for word in _NEWEST_WORDS)


def _agreeing(found: Mapping[str, tuple[_Path, _Meaning]]) -> dict[str, tuple[_Path, _Meaning]]:
    """Read the one number of a name as its step if another series beside it has the same step."""
    steps: dict[str, set[int]] = {}
    for path, meaning in found.values():
        if meaning.counts:
            folder = path.name.rpartition("/")[0]
            steps.setdefault(folder, set()).add(path.numbers[meaning.counts[-1]].value)
    result = dict(found)
    for name, (path, meaning) in found.items():
        plain = [n for n, number in enumerate(path.numbers) if number.means == _PLAIN and number.in_name]
        plain = [n for n in plain if n not in meaning.parts and not path.numbers[n].attached]
        if meaning.counts or len(plain) != 1:
            continue
        if path.numbers[plain[0]].value in steps.get(name.rpartition("/")[0], ()):
            result[name] = path, meaning._replace(counts=(plain[0],))
    return result


def _reading(path: _Path, meaning: _Meaning) -> NameReading:
    numbers, name = path.numbers, path.name
    order = tuple(numbers[n].value for n in meaning.counts)
    finest = numbers[meaning.counts[-1]] if meaning.counts else None
    totals = [number.value for number in numbers if number.means == _TOTAL]
    total = math.prod(totals) if totals else None
    part = numbers[meaning.parts[-1]].value if meaning.parts else None
    if part is None and total is not None:
        part = next((n.value for n, m in itertools.pairwise(numbers) if m.means == _TOTAL), None)
    kept = [numbers[n] for n in meaning.labels]
    kept += [number for number in numbers if not number.in_name and number.means == _LABEL]
    return NameReading(
        series=_blanked(name, numbers, kept),
        step=finest.value if finest is not None else None,
        word=finest.word if finest is not None else None,
        part=part,
        parts=total if part is not None else None,
        order=order,
    )


def _join_second_ranks(readings: dict[str, NameReading], found: Mapping[str, tuple[_Path, _Meaning]]) -> None:
    """Read names as parts of one that lacks a number: ``checkpoint_30.th`` and ``checkpoint_30.th.1``."""
    ranks: dict[str, dict[int, str]] = {}
    for name, (path, _) in found.items():
        last = path.numbers[-1] if path.numbers else None
        if last is None or not last.in_name or last.means != _PLAIN:
            continue
        folder, slash, base = name.rpartition("/")
        second = _SECOND.fullmatch(base)
        without = name[: last.start - 1] if last.after_suffix and last.end == len(name) else None
        if second is not None:
            without = folder + slash + second[1] + second[3]
        if without in readings:
            ranks.setdefault(without, {})[last.value] = name
    for first, others in ranks.items():
        if min(others) == 1 and _counts_on(others):
            readings[first] = one = msgspec.structs.replace(readings[first], part=0)
            for number, name in others.items():
                readings[name] = msgspec.structs.replace(one, part=number)


def _join_many_parts(readings: dict[str, NameReading], found: Mapping[str, tuple[_Path, _Meaning]]) -> None:
    """Number the parts of names that state several numbers for one: ``mp_rank_00_001``, ``__1_0.distcp``."""
    several: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, (path, meaning) in found.items():
        if len(meaning.parts) > 1:
            place = tuple(path.numbers[n].value for n in meaning.parts)
            several.setdefault(readings[name].series, {})[name] = place
    for names in several.values():
        places = {place: n for n, place in enumerate(sorted(set(names.values())))}
        for name, place in names.items():
            readings[name] = msgspec.structs.replace(readings[name], part=places[place])


_ROLES = (
    ("ema", _words("ema swa emas averaged avg")),
    ("optimizer", _words("opt optim optims optimizer optimizers optimiser optimg optimd optstate opts pdopt")),
    (
        "trainer state",
        _words(
            "rng random scheduler schedulers sched scaler scalers sampler samplers dataloader dataset resume trainer",
            "training recipe lr state states pdstates progress meta args replay buffer vecnormalize",
        ),
    ),
    (
        "model",
        _words(
            "model models net nets netg netd generator discriminator disc actor critic policy qf encoder decoder unet",
            "vae weights weight params lora adapter backbone module g d head gen dis student teacher mm lm embeddings",
            "pdparams consolidated pytorch controlnet transformer vocoder layer qnet network networks dit codec",
            "safetensors",
        ),
    ),
)
_ROLE_OF_WORD = {word: (n, role) for n, (role, words) in enumerate(_ROLES) for word in words}


def role_of(path: str) -> str:
    """Return what a path's words say that it holds: model, optimizer, ema, trainer state, or unknown.

    Never a reason for a verdict.
    """
    for part in reversed(path.split("/")):
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", part)}
        words |= {word.lower() for word in re.findall(r"[A-Za-z]+", part)}
        if words == {"train"}:
            return "trainer state"
        found = sorted({_ROLE_OF_WORD[word] for word in words if word in _ROLE_OF_WORD})
        if found:
            return _only_role(found, words)
    return "unknown"


def _only_role(found: Sequence[tuple[int, str]], words: set[str]) -> str:
    if {"model", "rng"} <= words or ({"model"} <= words and {"state", "states"} & words and found[0][0] > 1):
        return "model"
    return found[0][1]
