"""Which tensors and numbers of a checkpoint are state, whatever they are called.

A name says what something is for, and excuses nothing. What looks like state is state: whatever a container holds that
holds a matrix, a dict with `param_groups`, a scaler of gradients, what requires a gradient, what a module wrote. A lone
vector or number elsewhere, such as a history of losses, is state only if the checkpoint holds nothing else.
"""

from __future__ import annotations

import re

from ckptguard.checks.evidence import Evidence, ScannedTensor
from ckptguard.formats import Leaf
from ckptguard.formats.dtypes import DTYPES
from ckptguard.layouts.roles import STATE_ROLES, WRAPPERS, file_role, is_put_aside, key_role, number_role, place_role
from ckptguard.scan.result import Numbers, ScannedFile

# Known to hold scores: those of one callback say nothing about the average of the weights in another.
_HOLDERS = ("callbacks", "loops")
_GROUPS = re.compile(r"(.*?)(?:^|(?<=[.:]))param_groups\..*", re.DOTALL)
_SCALER = ("growth_factor", "backoff_factor")
_WALKED = ("torch_zip", "torch_legacy", "pickle")  # formats whose `scores` are all of them
# An infinite setting may be meant: no limit.
_LIMIT = re.compile(r".*(?:max|min|clip|clamp|limit|bound|thres|growth|norm|cap|until).*", re.IGNORECASE)
_RATES = frozenset(("lr", "initial_lr", "_last_lr", "base_lrs", "weight_decay", "eps", "momentum", "betas"))
_SCALES = frozenset(("scale", "cur_scale", "loss_scale"))


class FileState:
    """What of one file is state."""

    def __init__(self, evidence: Evidence, file: ScannedFile) -> None:
        structure = file.structure
        self._file, self._structure = file, structure
        self._tensors = evidence.tensors_of(file)
        self._containers = frozenset(structure.containers)
        self._learnt, self._scores = frozenset(structure.learnt), frozenset(structure.scores)
        names = {t.name for t in self._tensors} | {leaf.name for leaf in structure.leaves}
        grouped = (_GROUPS.fullmatch(name) for name in names if "param_groups." in name)
        self._optimizers = {found[1] for found in grouped if found is not None}
        beside = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in _SCALER}
        self._scalers = {name for name in names if name.rpartition(".")[2] == "scale"} & {
            f"{place}.scale" if place else "scale" for place in beside
        }
        self._with_matrix = {self._group(t.name) for t in self._tensors if _is_matrix(t)}
        self._with_matrix |= {self._group(name) for name in structure.matrices}
        self.is_nested = bool(self._with_matrix.difference(("",))) or any(
            key_role(c) or c in WRAPPERS for c in self._containers
        )

    def as_number(self, tensor: ScannedTensor, numbers: Numbers) -> Leaf:
        """Return a tensor as the number that it is, or that it holds."""
        beside = "" in self._with_matrix and not self._group(tensor.name) and tensor.name not in self._scores
        return Leaf(tensor.name, value_of(numbers), beside=beside)

    def is_weight(self, tensor: ScannedTensor) -> bool:
        """True if a tensor is no lone number: any of several elements, and one float among matrices or weights."""
        if tensor.numbers is None or tensor.numbers.count != 1 or self._is_learnt(tensor.name):
            return True
        if self.role_of_number(tensor.name) in ("optimizer", "scheduler", "scaler"):
            return False
        group = self._group(tensor.name)
        is_beside = group in self._with_matrix or self._structure.format in _WALKED
        if group and is_beside and tensor.name not in self._scores:
            return True
        return tensor.role in ("model", "ema") and tensor.name not in self._scores

    def holds(self, tensor: ScannedTensor) -> bool:
        """True if a tensor is state, whatever it is called."""
        name = tensor.name
        if is_put_aside(self._file.entry.key):
            return False
        if self._is_learnt(name) or self.role_of_number(name) in ("optimizer", "scaler"):
            return True
        if _is_matrix(tensor) or self._group(name) in self._with_matrix:
            return True
        if tensor.numbers is not None and tensor.numbers.count == 1 and self._group(name) and self.is_weight(tensor):
            return True
        return tensor.role in STATE_ROLES and (not self.is_nested or self._is_named(name))

    def role_of_number(self, name: str) -> str:
        """Return what a number beside the weights belongs to. Of a dict with groups of parameters, its name counts for
        nothing."""
        if any(name.startswith(prefix) for prefix in self._optimizers):
            return "optimizer"
        if name in self._scalers:
            return "scaler"
        return number_role(self._file.entry.key, name, self._structure.containers, self._structure.members)

    def weighs(self, number: Leaf, bad: str) -> bool:
        """True if a number that is not finite is an error: `bad` is "nan" or "inf".

        ReduceLROnPlateau has an infinite `best`, so infinity is an error only in a loss scale, a rate, an optimizer, or
        among weights.
        """
        role, parts = self.role_of_number(number.name), number.name.split(".")
        if is_put_aside(self._file.entry.key):
            return False
        if number.name in self._learnt:
            return True
        if number.of_array and number.dimensions > 1 and role in ("", *STATE_ROLES):
            return True
        if number.of_array and (role in STATE_ROLES or self._group(number.name) in self._with_matrix):
            return True
        if number.beside and (len(parts) > 1 or (bad == "nan" and not self.is_nested)):
            return True
        if role in ("model", "ema") and bad == "nan":  # of a layer's extra state
            return True
        rated = role or key_role(parts[0])  # of a flat file: an error if its name says so
        if rated not in ("optimizer", "scheduler", "scaler"):
            return False
        if bad == "nan" or rated == "scaler" or parts[-1] in _SCALES or not _RATES.isdisjoint(parts[-2:]):
            return True
        is_setting = "param_groups" in parts
        return (
            rated == "optimizer"
            and (is_setting or "state" in parts)
            and not (is_setting and _LIMIT.fullmatch(parts[-1]))
        )

    def _is_learnt(self, name: str) -> bool:
        if not self._learnt:
            return False
        if name in self._learnt or "" in self._learnt:
            return True
        parts = name.split(".")
        return any(".".join(parts[:n]) in self._learnt for n in range(1, len(parts)))

    def _is_named(self, name: str) -> bool:
        """True if a file, or a container, says that it holds weights or an optimizer."""
        stated = file_role(self._file.entry.key)
        if self._structure.members:
            return True
        return stated in STATE_ROLES or place_role(name, self._containers) in STATE_ROLES

    def _group(self, name: str) -> str:
        """Return the container that a name is in, or "" at the top."""
        first, _, rest = name.partition(".")
        if not rest or first not in self._containers:
            return ""
        return f"{first}.{rest.partition('.')[0]}" if first.lower() in _HOLDERS else first


class State:
    """What of a checkpoint is state."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._files: dict[str, FileState] = {}
        self._any: bool | None = None

    def of(self, file: ScannedFile) -> FileState:
        """Return what of this file is state."""
        key = file.entry.key
        if key not in self._files:
            self._files[key] = FileState(self._evidence, file)
        return self._files[key]

    def has_any(self) -> bool:
        """True if anything in the checkpoint is state. If nothing is, everything is."""
        if self._any is None:
            files = self._evidence.scan.files
            tensors = ((self.of(f), t) for f in files for t in self._evidence.tensors_of(f))
            self._any = any(own.is_weight(t) and own.holds(t) for own, t in tensors) or any(
                f.structure.matrices or any(leaf.of_array and leaf.dimensions > 1 for leaf in f.structure.leaves)
                for f in files
            )
        return self._any


def value_of(numbers: Numbers) -> float:
    """Return the number in a tensor of one float, without its sign if it is finite."""
    if numbers.nan:
        return float("nan")
    if numbers.posinf or numbers.neginf:
        return float("inf" if numbers.posinf else "-inf")
    return numbers.largest


def _is_matrix(tensor: ScannedTensor) -> bool:
    if len(tensor.shape) < 2 or not any(size != 1 for size in tensor.shape):
        return False
    known = DTYPES.get(tensor.dtype)
    return known is None or known.float is not None or known.size == 1  # bytes are often quantised weights
