"""Match the tensors of two checkpoints: by role and name, and by file if a name is not unique."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ckptguard.inspect.tensor_table import HeldTensor
from ckptguard.values.ids import Step, numbers_of

_CHUNK = re.compile(r"(?P<base>.+)\[[0-9:, ]*\]")
_MOST_DOTS = 64


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """All names of a role begin with `a` on one side and with `b` on the other. They were compared anyway."""

    role: str
    a: str
    b: str
    tensors: int


@dataclass
class Matching:
    """The pairing of two checkpoints. `recut` are tensors of both whose chunks differ, with the chunks of each side."""

    pairs: list[tuple[HeldTensor, HeldTensor]] = field(default_factory=list)
    removed: list[HeldTensor] = field(default_factory=list)
    added: list[HeldTensor] = field(default_factory=list)
    recut: list[tuple[list[HeldTensor], list[HeldTensor]]] = field(default_factory=list)
    renamings: list[Prefix] = field(default_factory=list)


class Tensors(Protocol):
    """The tensors of a checkpoint, and its step, which its files' names may state."""

    @property
    def tensors(self) -> Sequence[HeldTensor]: ...
    @property
    def step(self) -> Step: ...


def match_tensors(a: Tensors, b: Tensors) -> Matching:
    """Pair the tensors of two checkpoints. One without a partner is removed (from `a`) or added (in `b`)."""
    matching = Matching()
    steps = (a.step, b.step)
    named = operator.attrgetter("role", "name")
    left, right = _grouped(a.tensors, named), _grouped(b.tensors, named)
    for key, own in left.items():
        _pair_equal_names(own, right.pop(key, []), steps, matching)
    for own in right.values():
        matching.added += own
    _collect_chunks(matching)
    for role in dict.fromkeys(t.role for t in matching.removed):
        _pair_renamed(role, matching)
    return matching


def _grouped(
    tensors: Iterable[HeldTensor], key: Callable[[HeldTensor], tuple[str, str]]
) -> dict[tuple[str, str], list[HeldTensor]]:
    groups: dict[tuple[str, str], list[HeldTensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return groups


def _pair_equal_names(
    left: Sequence[HeldTensor], right: Sequence[HeldTensor], steps: tuple[Step, Step], matching: Matching
) -> None:
    """Pair tensors of one name: single ones directly, several (one per rank) by their files' names."""
    if len(left) == len(right) == 1:
        matching.pairs.append((left[0], right[0]))
        return
    theirs = {_without_step(t.file, steps[1]): t for t in right}
    taken = set()
    for tensor in left:
        partner = theirs.pop(_without_step(tensor.file, steps[0]), None)
        if partner is None:
            matching.removed.append(tensor)
        else:
            matching.pairs.append((tensor, partner))
            taken.add(id(partner))
    matching.added += [t for t in right if id(t) not in taken]


def _without_step(file: str, step: Step) -> str:
    """Return a file's name with the checkpoint's step replaced, as in ``global_step500/``."""
    for number in numbers_of(step):
        file = re.sub(rf"(?<!\d)0*{number}(?!\d)", "#", file)
    return file


def _collect_chunks(matching: Matching) -> None:
    """Move tensors of both sides with different chunks from added and removed to `recut`."""
    left, right = _grouped(matching.removed, _base), _grouped(matching.added, _base)
    both = [key for key in left if key in right and any(t.name != key[1] for t in (*left[key], *right[key]))]
    if not both:
        return
    # Chunks that happen to agree say nothing without the others.
    wanted = set(both)
    for a, b in matching.pairs:
        if _base(a) in wanted:
            left[_base(a)].append(a)
            right[_base(a)].append(b)
    matching.pairs = [pair for pair in matching.pairs if _base(pair[0]) not in wanted]
    matching.removed = [t for t in matching.removed if _base(t) not in wanted]
    matching.added = [t for t in matching.added if _base(t) not in wanted]
    matching.recut = [(left[key], right[key]) for key in both]


def _base(tensor: HeldTensor) -> tuple[str, str]:
    match = _CHUNK.fullmatch(tensor.name)
    return tensor.role, match["base"] if match else tensor.name


def _pair_renamed(role: str, matching: Matching) -> None:
    """Pair the rest of a role if one prefix explains more than half of it, by names and shapes.

    A prefix that replaces another one must explain all, because other layers can look like that.
    """
    left = _unique(t for t in matching.removed if t.role == role)
    right = _unique(t for t in matching.added if t.role == role)
    votes = _votes(left, right)
    if not votes:
        return
    (a, b), count = votes.most_common(1)[0]
    smaller = min(len(left), len(right))
    if count < 2 or (count < smaller if a and b else 2 * count <= smaller):
        return
    pairs = [
        (left[name], right[b + name.removeprefix(a)])
        for name in left
        if name.startswith(a) and b + name.removeprefix(a) in right
    ]
    if 2 * sum(x.shape == y.shape for x, y in pairs) <= len(pairs):
        return
    gone = {id(t) for pair in pairs for t in pair}
    matching.removed = [t for t in matching.removed if id(t) not in gone]
    matching.added = [t for t in matching.added if id(t) not in gone]
    matching.pairs += pairs
    matching.renamings.append(Prefix(role=role, a=a, b=b, tensors=len(pairs)))


def _unique(tensors: Iterable[HeldTensor]) -> dict[str, HeldTensor]:
    named: dict[str, HeldTensor] = {}
    for tensor in tensors:
        named.setdefault(tensor.name, tensor)
    return named


def _votes(left: dict[str, HeldTensor], right: dict[str, HeldTensor]) -> Counter[tuple[str, str]]:
    """Count how many tensors each change of a prefix would pair: one added, removed or replaced."""
    votes: Counter[tuple[str, str]] = Counter()
    for name in left:
        votes.update((name[: -len(rest)], "") for rest in _rests(name) if rest in right)
    for name in right:
        votes.update(("", name[: -len(rest)]) for rest in _rests(name) if rest in left)
    firsts: dict[str, set[str]] = {}
    for name in right:
        first, dot, rest = name.partition(".")
        if dot:
            firsts.setdefault(rest, set()).add(first + dot)
    for name in left:
        first, dot, rest = name.partition(".")
        own = firsts.get(rest, set()) - {first + dot}
        if dot and len(own) == 1:
            votes[(first + dot, next(iter(own)))] += 1
    return votes


def _rests(name: str) -> list[str]:
    """Return what is left of a name after its first parts."""
    parts = name.split(".", _MOST_DOTS)
    return [".".join(parts[i:]) for i in range(1, len(parts))]
