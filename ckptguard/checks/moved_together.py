"""Check that no file comes from an earlier save.

What moves together moved. A file with the bytes of an earlier save may rest, unless what moves with it went on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from ckptguard.checks.digests import same_content
from ckptguard.checks.evidence import Evidence, ScannedTensor
from ckptguard.checks.order import counters_of
from ckptguard.checks.stale import is_compared, is_moment, skipped_steps
from ckptguard.formats.dtypes import DTYPES
from ckptguard.layouts.roles import file_role
from ckptguard.scan.result import Scan, ScannedFile
from ckptguard.values.manifest import Counter, File, Manifest
from ckptguard.values.verdict import Finding, Severity

# Files of one optimizer by rank. Others with equal names inside may be of two models, of which one rests.
_BY_RANK = re.compile(r"rank_?\d|\.distcp$")
# They change with each update; the largest moment so far does not.
_AVERAGE = re.compile(r"(.+)\.(?:exp_avg|exp_avg_sq|momentum_buffer)")
_DIGITS = re.compile(r"\d+")
_RATE = re.compile(r"_last_lr\.\d+|param_groups\.\d+\.lr")
# They rise with each update, and no setting is called so.
_PROGRESS = ("global_step", "global_steps", "iter_num", "num_updates", "num_timesteps")
_UPDATES = "global_steps"  # DeepSpeed's, of the state that it saves and loads as a whole
_COARSE = "epoch"  # it may rise between the last update and a final save


def check_moved_together(evidence: Evidence) -> Iterator[Finding]:
    """Report files of earlier saves. One contradiction is a sickness, a second one an error.

    What rests since the save directly before may be frozen. What changed and went back to an earlier save is not.
    """
    left = list(evidence.scan.files)
    for place, save in enumerate(evidence.saves):
        there: defaultdict[tuple[int, str], list[File]] = defaultdict(list)
        for sealed in save.files:
            there[sealed.size, sealed.envelope].append(sealed)
        old = [f for f in left if any(same_content(one, f) for one in there[f.entry.size, f.envelope])]
        left = [file for file in left if file not in old]
        new = [file for file in evidence.scan.files if file not in old]
        if old and new:
            yield from _Comparison(evidence, place, old, new).findings()


class _Tensor(NamedTuple):
    """A tensor that updates change."""

    file: ScannedFile
    of: ScannedTensor
    digest: str

    @property
    def name(self) -> tuple[str, str]:
        """Its name within its role: equal in each save."""
        return self.of.role, self.of.name

    def is_touched_moment(self) -> bool:
        """True if it holds moments, and an update has changed them from zero."""
        known = self.of.numbers
        return is_moment(self.of.role, self.of.name, self.of.dtype) and known is not None and known.largest > 0

    def is_weight(self) -> bool:
        """True for matrices of weights. A vector of low precision may keep its bytes."""
        return self.of.role == "model" and len(self.of.shape) > 1


class _Comparison:
    """The files of a checkpoint that are those of an earlier save, `old`, and the others."""

    def __init__(self, evidence: Evidence, place: int, old: list[ScannedFile], new: list[ScannedFile]) -> None:
        self._evidence, self._place, self._old_files, self._new_files = evidence, place, old, new
        self._save = evidence.saves[place]
        # It shows what moves in this training: the save before, or the one after `save`.
        self._other = evidence.saves[0 if place else 1] if len(evidence.saves) > 1 else None

    def findings(self) -> Iterator[Finding]:
        """Return what contradicts that the old files belong to this checkpoint."""
        moments = [t for t in self._old if t.is_touched_moment()]
        others_moments = bool(moments) and any(t.is_touched_moment() for t in self._new)
        if self._place:
            held, signs = self._gone_back()
        elif others_moments:
            held, signs = self._resting_parts()
        else:
            held, signs = moments, self._resting_optimizer() if moments else []
        state = {t.file.entry.key for t in held} if signs else set()
        for file in self._old_files:
            key = file.entry.key
            if key in state:
                yield from self._reported(key, signs)
            elif others_moments and any(t.file is file for t in moments):
                message = f"it has the same bytes as in {self._save.path}, while others changed"
                yield Finding("same-save", Severity.WARNING, f"{message}: it may belong to that save", key)
            else:
                yield from self._reported(key, self._counter_stayed(file) or self._schedule_stayed(file))

    def _reported(self, key: str, signs: list[str]) -> Iterator[Finding]:
        for sign in signs[:1]:
            message = f"it has the same bytes as in {self._save.path}, while {sign}: it belongs to that save"
            yield Finding("same-save", Severity.SICKNESS, message, key)
        for sign in signs[1:2]:
            yield Finding("same-save", Severity.ERROR, f"{sign}: it belongs to {self._save.path}", key)

    def _resting_optimizer(self) -> list[str]:
        """Compare an optimizer that rests as a whole with the weights and the counters."""
        weights = [t for t in (*self._old, *self._new) if t.is_weight() and t.name in self._there]
        used = [t for t in weights if self._is_used(t)]
        if not any(self._moved(t) for t in weights):
            return ["DeepSpeed counted updates"] if self._updates_made() else []
        went_on = self._went_on or self._rates_differ(self._old_files, self._new_files)
        if not went_on or not all(self._moved(t) for t in used):
            return []  # a save of other weights with the same state, such as their average
        if not any(self._is_used(t) for t in self._old if t.is_touched_moment()):
            return []  # it rested before, too: what trains them is not saved
        counts = self._updates_made() or went_on != self._went_on or self._counts_steps()
        return ["the weights changed", *([f"its optimizer made no step, but {went_on}"] if counts else [])]

    def _resting_parts(self) -> tuple[list[_Tensor], list[str]]:
        """Compare parts of an optimizer with the other pieces of the same tensors, and with their weights."""
        if not any(t.is_touched_moment() and self._moved(t) for t in self._new):
            return [], []
        kinds = {self._kind(f.entry.key) for f in self._old_files if _BY_RANK.search(f.entry.key)}
        moved = {t.name for t in self._new if self._kind(t.file.entry.key) in kinds and self._moved(t)}
        held = [t for t in self._old if self._kind(t.file.entry.key) in kinds and t.name in moved and _is_precise(t.of)]
        held = [t for t in held if t.of.numbers is not None and t.of.numbers.largest > 0]
        sign = "other pieces of its tensors changed"
        # One alone may rest: the largest moment so far does.
        if len({t.name for t in held}) < 2 or not any(t.is_touched_moment() for t in held):
            held, sign = self._left_by_weights(), "the weights changed that its moments are of"
        own = {(c.kind, c.value) for c in self._counters(self._old_files)}
        rises = [(kind, then, now) for kind, then, now in self._rises if (kind, then) in own]
        return held, [sign, *(f"its {kind} is {then}, and {now} beside it" for kind, then, now in rises[:1])]

    def _left_by_weights(self) -> list[_Tensor]:
        """Return running averages that rest while every weight of their name changed."""
        moved: dict[str, bool] = {}
        for t in (*self._old, *self._new):
            for name in {t.of.name, t.of.name.partition(".")[2]} if t.of.role == "model" else ():
                moved[name] = moved.get(name, True) and self._moved(t)
        found = []
        for t in self._old:
            average = _AVERAGE.fullmatch(t.of.name)
            if average is not None and t.is_touched_moment() and _is_precise(t.of) and self._is_used(t):
                parts = average[1].split(".")
                names = (".".join(parts[n:]) for n in range(len(parts)))
                if next((moved[name] for name in names if name in moved and not name.isdigit()), False):
                    found.append(t)
        return found

    def _gone_back(self) -> tuple[list[_Tensor], list[str]]:
        """Compare state that had changed since that save with what did not go back."""
        held = [t for t in self._old if t.is_weight() or t.of.role == "ema" or t.is_touched_moment()]
        since = _digests(self._other)
        changed = [t for t in held if t.name in since and t.digest not in since[t.name]]
        if len(changed) * 2 <= len(held):
            return [], []  # repaired
        if any(t.is_touched_moment() and self._moved(t) for t in self._new):
            signs = ["other moments changed"]
        elif any(t.is_weight() for t in changed) or not self._went_on:
            return [], []  # training went back as a whole; a counter or an average may go on
        elif any(t.is_weight() and self._moved(t) for t in self._new):
            signs = ["the weights changed"]
        elif any(kind == _UPDATES for kind, _, _ in self._rises):
            signs = ["DeepSpeed counted updates"]
        else:
            return [], []
        if self._went_on and self._counts_steps():
            signs.append(f"its optimizer went back, but {self._went_on}")
        return changed, signs

    def _counter_stayed(self, file: ScannedFile) -> list[str]:
        """Compare the counter in a file with the one that it agreed with."""
        own = {c.value: c.kind for c in self._counters([file]) if c.kind in _PROGRESS and c.value}
        if not own:
            return []
        there, here = self._save.step, self._evidence.checkpoint.step
        named = [("number in the name", there, here)] if isinstance(there, int) and isinstance(here, int) else []
        for kind, before, now in (*self._rises, *named):
            if before in own and any(self._moved(t) for t in self._new):
                return [f"its {own[before]} is {before}, and the {kind} {now}"]
        return []

    def _schedule_stayed(self, file: ScannedFile) -> list[str]:
        """Compare a schedule with the optimizer. It may have ended, but Trainer's goes on with each update."""
        if self._evidence.checkpoint.layout != "hf-trainer":
            return []
        last = next((leaf.value for leaf in file.structure.leaves if leaf.name == "last_epoch"), None)
        if not last or all(before != last for _, before, _ in self._rises):
            return []
        differ = self._rates_differ(self._new_files, [file])
        return [differ] if differ else []

    @cached_property
    def _old(self) -> list[_Tensor]:
        return self._tensors(self._old_files)

    @cached_property
    def _new(self) -> list[_Tensor]:
        return self._tensors(self._new_files)

    @cached_property
    def _there(self) -> dict[tuple[str, str], set[str]]:
        return _digests(self._save)

    @cached_property
    def _before(self) -> dict[tuple[str, str], set[str]]:
        return _digests(self._other)

    def _moved(self, tensor: _Tensor) -> bool:
        return tensor.name in self._there and tensor.digest not in self._there[tensor.name]

    def _is_used(self, tensor: _Tensor) -> bool:
        """True if a tensor changed between earlier saves, or if there is only one."""
        there = self._there.get(tensor.name, set())
        return self._other is None or there.isdisjoint(self._before.get(tensor.name, ()))

    @cached_property
    def _rises(self) -> list[tuple[str, int, int]]:
        """The counters of the new files that rose since that save, each with its values then and now."""
        there = {self._source(c): c.value for c in self._save.counters}
        usual = {c.kind: c.value for c in self._other.counters} if self._other is not None else {}
        found = []
        for c in self._counters(self._new_files):
            before = there.get(self._source(c))
            if before is None or c.kind == _COARSE:
                continue
            # Less than usual is no time between two saves: a counter may rise after the last update.
            if (c.value - before) * 2 >= max(abs(before - usual.get(c.kind, before - 3)), 1):
                found.append((c.kind, before, c.value))
        return found

    @cached_property
    def _went_on(self) -> str:
        return next((f"{kind} rose from {before} to {now}" for kind, before, now in self._rises), "")

    def _updates_made(self) -> bool:
        """True if DeepSpeed counted updates since, without those that it skipped."""
        before, facts = self._evidence.previous, self._evidence.previous_facts
        skipped = skipped_steps(self._evidence)
        if before is None or before.id != self._save.id or facts is None or facts.skipped_steps is None:
            return False
        rises = (now - before for kind, before, now in self._rises if kind == _UPDATES)
        return skipped is not None and any(rise > skipped - facts.skipped_steps for rise in rises)

    def _counts_steps(self) -> bool:
        return any(c.value for c in self._counters(self._old_files) if c.kind != _COARSE)

    def _rates_differ(self, optimizers: Iterable[ScannedFile], schedulers: Iterable[ScannedFile]) -> str:
        """Say how the learning rates of an optimizer and of its only scheduler differ; "" if they do not."""
        every = [f for f in self._evidence.scan.files if file_role(f.entry.key) == "scheduler"]
        mine, theirs = _rates(optimizers, "optimizer"), _rates(schedulers, "scheduler")
        if len(every) != 1 or not mine or not theirs or not mine.isdisjoint(theirs):
            return ""
        return f"the optimizer's learning rate is {min(mine):g}, that of the schedule {min(theirs):g}"

    def _counters(self, files: Iterable[ScannedFile]) -> tuple[Counter, ...]:
        return counters_of(self._evidence.checkpoint, Scan(files=tuple(files), seconds=0.0))

    def _source(self, counter: Counter) -> tuple[str, str]:
        return counter.kind, _DIGITS.sub("#", counter.source)

    def _kind(self, key: str) -> str:
        """Return what the files of all ranks are called."""
        return _DIGITS.sub("#", self._evidence.checkpoint.inside(key))

    def _tensors(self, files: Iterable[ScannedFile]) -> list[_Tensor]:
        return [
            _Tensor(file, t, file.span_digests[t.span])
            for file in files
            for t in self._evidence.tensors_of(file)
            if t.span is not None and (is_compared(t.role, t.name, t.dtype) or t.role == "ema")
        ]


def _digests(save: Manifest | None) -> dict[tuple[str, str], set[str]]:
    """Return the digests of each tensor of a save: of all its pieces."""
    found: dict[tuple[str, str], set[str]] = {}
    for file in save.files if save is not None else ():
        for t in file.tensors:
            if t.span is not None:
                found.setdefault((t.role, t.name), set()).add(file.spans[t.span].blake3)
    return found


def _is_precise(tensor: ScannedTensor) -> bool:
    """True for floats in which every update shows."""
    known = DTYPES.get(tensor.dtype)
    return known is not None and known.float is not None and known.size >= 4


def _rates(files: Iterable[ScannedFile], role: str) -> set[float]:
    leaves = (leaf for f in files if file_role(f.entry.key) == role for leaf in f.structure.leaves)
    return {float(leaf.value) for leaf in leaves if _RATE.fullmatch(leaf.name)}
