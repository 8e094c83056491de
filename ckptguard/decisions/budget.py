"""Choose what goes so that a run stays below its `keep_bytes`: what is worth least first. Pure.

- A file counts once, whatever names it has. What the trash holds is not free yet, but it will be.
- Thinning comes first: nothing goes that thinning others would spare.
- These never go: the newest `keep_good` good ones that were not thinned, the newest good one, what is pinned or in use,
  what has no verdict, and all older than that. What is not good goes by the rule for it alone.
- Of the others those go first that the fewest rules keep, then the oldest; the best by a metric go last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import msgspec

from ckptguard.decisions.retention import Present, RetentionDecision, decide
from ckptguard.values.ids import CheckpointId
from ckptguard.values.plain_numbers import size
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome

_MOST_NAMED = 4
# By path the files of which thinning would take something: the number of bytes, None for all.
WillThin = Mapping[str, Mapping[str, int | None]]


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """What occupies the bytes of a run. Equal files are one file, whatever names it has.

    - `sizes`: the bytes of each file.
    - `in_place`: the files of each checkpoint in place, by its path. `named`: which one a name in place is of.
    - `held`: files that stay whatever goes: of copies, of the quarantine, and with a name outside of the run.

    The others are in the trash alone.
    """

    sizes: Mapping[Hashable, int]
    in_place: Mapping[str, Collection[Hashable]]
    named: Mapping[str, Hashable] = {}
    held: Collection[Hashable] = frozenset()

    def total(self, files: Iterable[Hashable]) -> int:
        """Return the bytes of files, each once."""
        return sum(self.sizes.get(file, 0) for file in set(files))


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands to its `keep_bytes`. `used` were its bytes before. Of these `in_trash` are free once the grace
    period of the trash is over. `to_thin` are paths that should be thinned. `after`: what is left once they are, and
    the trash is empty. `why` says in words why that is too much, "" if it is not."""

    keep_bytes: int
    used: int
    in_trash: int
    to_thin: tuple[str, ...] = ()
    after: int = 0
    why: str = ""


def cut_to_budget(
    decisions: Sequence[RetentionDecision],
    space: Space,
    policy: Policy,
    *,
    saves: Iterable[Collection[CheckpointId]] = (),
    will_thin: WillThin | None = None,
) -> tuple[list[RetentionDecision], Budget | None]:
    """Return the decisions with those turned that the budget asks for, and how the run stands to it. `will_thin` are
    what thinning would take, by path, in its order."""
    if policy.keep_bytes is None:
        return list(decisions), None
    staying = {d.checkpoint.path for d in decisions if d.keep}
    refs = Counter(file for path in staying for file in set(space.in_place.get(path, ())))
    taken = {
        path: {space.named[f]: bytes for f, bytes in files.items() if f in space.named}
        for path, files in (will_thin or {}).items()
        if path in staying
    }
    thins = {
        path: sum(
            space.total([f]) if bytes is None else min(bytes, space.total([f]))
            for f, bytes in files.items()
            if refs[f] == 1 and f not in space.held
        )
        for path, files in taken.items()
    }
    left, used = space.total([*refs, *space.held]), space.total(space.sizes)
    gone: set[str] = set()
    for unit in _least_valuable_first(decisions, policy, [frozenset(save) for save in saves]):
        if left - sum(thins.values()) <= policy.keep_bytes:
            break
        files = {file for path in unit for file in space.in_place.get(path, ())}
        if files <= set(space.held):
            continue  # that would free nothing
        for path in unit:
            for file in set(space.in_place.get(path, ())):
                refs[file] -= 1
                left -= space.sizes.get(file, 0) if refs[file] == 0 and file not in space.held else 0
            thins.pop(path, None)
        gone |= unit
    after, to_thin = left, list[str]()
    for path, bytes in thins.items():
        if after > policy.keep_bytes and bytes:
            after -= bytes
            to_thin.append(path)
    budget = Budget(
        keep_bytes=policy.keep_bytes,
        used=used,
        in_trash=used - space.total([*space.held, *(f for files in space.in_place.values() for f in files)]),
        to_thin=tuple(to_thin),
        after=after,
        why=_why(decisions, gone, space, after - policy.keep_bytes) if after > policy.keep_bytes else "",
    )
    return [_turned(d) if d.checkpoint.path in gone else d for d in decisions], budget


def shares(uses: Mapping[str, int], total: int) -> dict[str, int]:
    """Return what each run may occupy so that all together stay below a total, by what each occupies. All have an equal
    share, and what one does not need goes to the others."""
    found, left = dict[str, int](), total
    for number, (run, use) in enumerate(sorted(uses.items(), key=lambda one: (one[1], one[0]))):
        found[run] = left // (len(uses) - number)
        left -= min(use, found[run])
    return found


def _least_valuable_first(
    decisions: Sequence[RetentionDecision], policy: Policy, saves: Sequence[frozenset[CheckpointId]]
) -> list[frozenset[str]]:
    """Return what may go beyond the rules, in the order in which it goes: paths, of a save of several all at once."""
    floor = Policy(keep_last=1, keep_good=policy.keep_good, drop_failed=policy.drop_failed)
    must = {d.checkpoint.path for d in decide([d.checkpoint for d in decisions], floor, saves=saves) if d.keep}
    may = {
        d.checkpoint.id: d
        for d in decisions
        if d.keep and d.checkpoint.path not in must and d.checkpoint.outcome is Outcome.GOOD
    }
    units = _joined([frozenset((id,)) for id in may] + list(saves))
    by_id = {d.checkpoint.id: d for d in decisions if d.keep and d.checkpoint.outcome is Outcome.GOOD}
    ages = _ages([d.checkpoint for d in may.values()])
    found = []
    for unit in units:
        own = [by_id[id] for id in unit if id in by_id]
        if own and all(d.checkpoint.id in may for d in own):
            value = max((_value(d), ages[d.checkpoint.path]) for d in own)
            found.append((value, frozenset(d.checkpoint.path for d in own)))
    return [paths for _, paths in sorted(found, key=lambda one: (one[0], sorted(one[1])))]


def _value(decision: RetentionDecision) -> tuple[bool, int]:
    ruled = [why for why in decision.reasons if why != "no rule says what may go"]
    return any(why.startswith("one of the best ") for why in ruled), len(ruled)


def _ages(checkpoints: Sequence[Present]) -> dict[str, tuple[float, tuple[object, ...]]]:
    """Return what orders checkpoints by age. Of one series its steps do, whatever its clock said."""
    found: dict[str, tuple[float, tuple[object, ...]]] = {}
    newest: dict[str, float] = {}
    for one in sorted(checkpoints, key=lambda one: (one.id.order, one.path)):
        series = one.id.series
        newest[series] = max(newest.get(series, -math.inf), -math.inf if one.saved is None else one.saved)
        found[one.path] = newest[series], (*one.id.order, one.path)
    return found


def _joined(sets: Sequence[frozenset[CheckpointId]]) -> list[frozenset[CheckpointId]]:
    """Return the sets, with those that have a member in common as one."""
    found: dict[CheckpointId, frozenset[CheckpointId]] = {}
    for one in sets:
        whole = one.union(*(found[id] for id in one if id in found))
        found |= dict.fromkeys(whole, whole)
    return list(dict.fromkeys(found.values()))


def _turned(decision: RetentionDecision) -> RetentionDecision:
    ruled = "; ".join(why for why in decision.reasons if why != "no rule says what may go")
    why = f"keep_bytes needs its room, although a rule keeps it: {ruled}" if ruled else "keep_bytes needs its room"
    return msgspec.structs.replace(decision, keep=False, reasons=(why,))


def _why(decisions: Sequence[RetentionDecision], gone: Collection[str], space: Space, over: int) -> str:
    """Say what stays although it is too much."""
    by_reason: dict[str, list[str]] = {}
    for d in decisions:
        if d.keep and d.checkpoint.path not in gone:
            by_reason.setdefault(d.reasons[0], []).append(d.checkpoint.path)
    parts = []
    for reason, paths in by_reason.items():
        total = space.total(file for path in paths for file in space.in_place.get(path, ()))
        parts.append(
            (total, f"{paths[0] if len(paths) == 1 else f'{len(paths)} checkpoints'} ({size(total)}): {reason}")
        )
    held = space.total(space.held)
    parts += [(held, f"{size(held)} are of protected copies, of the quarantine, or have another name")] if held else []
    parts.sort(key=lambda part: part[0], reverse=True)
    more = f"; and {len(parts) - _MOST_NAMED} more reasons" if len(parts) > _MOST_NAMED else ""
    return f"{size(over)} more than keep_bytes must stay: " + "; ".join(t for _, t in parts[:_MOST_NAMED]) + more
