"""What the ledger's names say of each generation, and which of several series is ahead. Pure.

For one generation the verdict with the highest number counts. Of verdicts with the same number the worst counts.
Known-good is the highest step whose sealed bytes are GOOD, latest generation first. No clock decides the order.
`runs/find_known_good.py` finds it by these rules.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from ckptguard.values.ids import CheckpointId, Step, numbers_of, parse_id, single_number
from ckptguard.values.manifest import Manifest, Tensor
from ckptguard.values.verdict import WORST_FIRST, Outcome

IN_PLACE, KEPT = "in place", "kept"  # where the files of a checkpoint are

_NAME = re.compile(
    r"(?P<id>(?:\d{12}(?:-\d{12})*|-)\.[1-9]\d*)\.(?P<number>\d{4,9})\.(?P<outcome>good|suspect|incomplete|bad)\.json"
)


class CurrentVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The current outcome of one generation, and the number of the verdict that gives it."""

    id: CheckpointId
    number: int
    outcome: Outcome


def verdict_name(current_verdict: CurrentVerdict) -> str:
    """Return the ledger name of a verdict. It contains the id, the order and the outcome."""
    return f"{current_verdict.id.record_name}.{current_verdict.number:04d}.{current_verdict.outcome.value}.json"


def parse_verdict_name(series: str, name: str) -> CurrentVerdict | None:
    """Parse a ledger name of a series; None if it is not a ledger entry."""
    match = _NAME.fullmatch(name)
    parsed = parse_id(series, match["id"]) if match else None
    if match is None or parsed is None:
        return None
    return CurrentVerdict(id=parsed, number=int(match["number"]), outcome=Outcome(match["outcome"]))


def current_verdicts(series: str, names: Iterable[str]) -> dict[CheckpointId, CurrentVerdict]:
    """Return the current standing of every generation that a series' ledger names mention."""
    current: dict[CheckpointId, CurrentVerdict] = {}
    for name in names:
        entry = parse_verdict_name(series, name)
        if entry is not None:
            current[entry.id] = max(current.get(entry.id, entry), entry, key=weight)
    return current


def weight(entry: CurrentVerdict) -> tuple[int, int]:
    """Return the order of the verdicts on one generation: the latest counts, or the worse of two with one number."""
    return entry.number, -WORST_FIRST.index(entry.outcome)


def since(id: CheckpointId, names: Iterable[str], outcomes: Collection[Outcome]) -> CurrentVerdict | None:
    """Return the first of a generation's newest verdicts that all say one of these outcomes. None if the newest says
    another one."""
    entries: dict[int, CurrentVerdict] = {}
    for name in names:
        entry = parse_verdict_name(id.series, name)
        if entry is not None and entry.id == id:
            entries[entry.number] = max(entries.get(entry.number, entry), entry, key=weight)
    found = None
    for number in sorted(entries, reverse=True):
        if entries[number].outcome not in outcomes:
            break
        found = entries[number]
    return found


# Counters of training progress, the finest first: counters inside a checkpoint, then those in its name.
OPTIMIZER_STEP = "optimizer step"
COUNTERS = (
    *("global_step", "global_steps", "iter_num", "iteration", "num_updates", "num_timesteps", "step"),
    *(OPTIMIZER_STEP, "epoch"),
)
NUMBER_IN_NAME = "number in its name"
NAMED = ("step in its name", "epoch in its name", NUMBER_IN_NAME)
# Words in names: of the save that a resume reads, and of those that it leaves alone.
SAVED_LAST = ("last", "latest")
SET_ASIDE = ("best", "final", "init")
_WORDS = re.compile(rf"(?<![a-z])(?:{'|'.join((*SAVED_LAST, *SET_ASIDE))})(?![a-z])")
_WEIGHTS = ("model", "ema", "")
_OPTIMIZERS = re.compile(
    r"(?:^|\.)state\.\d+\.[a-z_]+$|(?:^|\.)(?:exp_avg(?:_sq)?|max_exp_avg_sq|momentum_buffer)(?:\.|$)"
)


class SeriesHead(msgspec.Struct, frozen=True, kw_only=True):
    """The newest known-good checkpoint of a series, to compare it with other series. `counters` maps each kind to its
    value. `tensors` is a digest of the tensors' names; `saved_at` is in ns by the storage's clock. `whole`: a
    guard saved it, so it is all of its save."""

    series: str
    counters: Mapping[str, int]
    has_optimizer: bool
    sealed_at: str
    has_weights: bool = True
    path: str = ""
    tensors: bytes = b""
    saved_at: int | None = None
    whole: bool = False


def series_head_of(manifest: Manifest) -> SeriesHead:
    """Describe a checkpoint for a comparison with other series."""
    counters = {c.kind: c.value for c in manifest.counters}
    if manifest.id.number is not None:
        counters.setdefault(NUMBER_IN_NAME, manifest.id.number)
    return SeriesHead(
        series=manifest.series,
        counters=counters,
        has_optimizer=any(_is_optimizers(t) for f in manifest.files for t in f.tensors),
        sealed_at=manifest.sealed_at,
        has_weights=any(t.role in _WEIGHTS and not _is_optimizers(t) for f in manifest.files for t in f.tensors),
        path=manifest.path,
        tensors=_names_digest(manifest),
        saved_at=manifest.saved_at,
        whole=manifest.layout == "ckptguard",
    )


def _is_optimizers(tensor: Tensor) -> bool:
    """True for optimizer state: by its role, or by the names that torch's optimizers give, in any file."""
    if tensor.role == "optimizer":
        return True
    name = tensor.name  # few have such a word, and a run has millions of names
    has_word = "exp_avg" in name or "state." in name or "momentum_buffer" in name
    return has_word and _OPTIMIZERS.search(name) is not None


def _names_digest(manifest: Manifest) -> bytes:
    names = sorted(tensor.name for file in manifest.files for tensor in file.tensors)
    return hashlib.blake2b("\n".join(names).encode("utf-8", "surrogateescape"), digest_size=16).digest()


def kind_of_name(series: str) -> str:
    """Return ``last``, ``best``, ``final`` or ``init`` for a name with such a word, which is an alternative to numbered
    saves, else ""."""
    words = _WORDS.findall(series.lower())
    return "" if not words else SAVED_LAST[0] if words[-1] in SAVED_LAST else words[-1]


def numbered_form(series: str) -> str | None:
    """Return a fixed name with a number in place of its word: ``latest_net_G.pth`` is ``#_net_G.pth``. None without
    such a word, and for the name of a number."""
    folder, slash, name = series.rpartition("/")
    words = [*_WORDS.finditer(name.lower())]
    if len(words) != 1 or "#" in name:
        return None
    return folder + slash + name[: words[0].start()] + "#" + name[words[0].end() :]


def choose_series(heads: Sequence[SeriesHead]) -> tuple[int, str]:
    """Return the index of the series with the newest known-good checkpoint, and why; "" if there is only one.

    Series with optimizer state come before series with weights alone. The finest counter that all of them have decides,
    then every other counter. Of equal ones the one comes first whose name a resume reads (see `_place_of_name`), then
    the highest number in a name, then the shortest name. Only without a common counter does the time of sealing count.
    """
    if len(heads) == 1:
        return 0, ""
    every = [n for n, head in enumerate(heads) if head.has_optimizer] or list(range(len(heads)))
    if len(every) == 1:
        return every[0], "the only one of several series with optimizer state"
    kind = next((k for k in (*COUNTERS, *NAMED) if all(k in heads[n].counters for n in every)), None)
    equal = _highest(heads, every, COUNTERS if kind is None else (kind, *COUNTERS))
    latest = max(equal, key=lambda n: (heads[n].sealed_at, heads[n].series))
    if kind is None:
        shared = heads[latest].counters.keys() & set(COUNTERS)
        equal = [n for n in equal if n == latest or not shared.isdisjoint(heads[n].counters)]
    place = min(_place_of_name(heads[n].series) for n in equal)
    named = _highest(heads, [n for n in equal if _place_of_name(heads[n].series) == place], NAMED)
    best = min(named, key=lambda n: (len(heads[n].series), heads[n].series))
    why = "was sealed last" if best == latest else "equals the one that was sealed last"
    if kind is not None:
        why = f"has the highest {kind} ({heads[best].counters[kind]})"
    first = f", and of {len(equal)} equal ones its name comes first" if len(equal) > 1 else ""
    return best, f"of {len(every)} series this one {why}{first}"


def _highest(heads: Sequence[SeriesHead], left: Sequence[int], kinds: Iterable[str]) -> list[int]:
    """Return those of `left` that are not behind another by one counter after the other. Without a counter, none is
    behind by it."""
    for kind in kinds:
        highest = max((heads[n].counters[kind] for n in left if kind in heads[n].counters), default=0)
        left = [n for n in left if heads[n].counters.get(kind, highest) == highest]
    return list(left)


def _place_of_name(series: str) -> int:
    """Return 0 for a name such as ``last.pt``, which a resume reads, 1 for another fixed name, and 2 for numbers, which
    it searches. ``best.pt`` and its like are 3."""
    words = _WORDS.findall(series.lower())
    if words:
        return 0 if words[-1] in SAVED_LAST else 3
    return 2 if "#" in series.rpartition("/")[2] else 1


def is_ahead(one: SeriesHead, other: SeriesHead) -> bool:
    """True if a checkpoint of one series is surely better than one of another; False if they are equal."""
    if one.has_optimizer != other.has_optimizer:
        return one.has_optimizer
    kind = finest_common(one.counters, other.counters)
    return one.sealed_at > other.sealed_at if kind is None else one.counters[kind] > other.counters[kind]


def finest_common(one: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Return the finest counter that both have."""
    return next((k for k in (*COUNTERS, *NAMED) if k in one and k in other), None)


def finest_counter(counters: Mapping[str, int]) -> str | None:
    """Return the finest counter inside a checkpoint as text, or None."""
    return next((f"{kind} {counters[kind]}" for kind in COUNTERS if kind in counters), None)


def updates_in(counters: Mapping[str, int]) -> int | None:
    """Return how many updates a checkpoint says it has behind it, or None."""
    return next((counters[kind] for kind in COUNTERS if kind in counters and kind != "epoch"), None)


def order_words(step: Step) -> str:
    """Say what orders the checkpoints of a series."""
    if step is None:
        return "the order in which its contents were saved under this name"
    return "the number in its name" if isinstance(step, int) else "the numbers in its name, one after the other"


def may_be_newer(series: str, step: Step, known_good: CheckpointId) -> bool:
    """True if a checkpoint without a verdict may be newer than the known-good one, judged by names alone. A fixed name
    always may be."""
    if series == known_good.series:
        return step is None or numbers_of(step) > numbers_of(known_good.step)
    number = single_number(step)
    return number is None or known_good.number is None or number > known_good.number
