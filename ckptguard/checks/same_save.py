"""Check that the files of all ranks belong to the same save.

A killed save over an older one leaves files of both, each of them whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.layouts.deepspeed import leftovers
from ckptguard.layouts.roles import number_role
from ckptguard.scan.result import ScannedFile
from ckptguard.values.verdict import Finding, Severity

_BY_RANK = re.compile(
    r"(?:.*/)?(?:\w*zero_pp_rank_\d+_mp_rank_\d+_optim_states|mp_rank_[\d_]+/(?:model_optim_rng|distrib_optim))\.pt"
)
_STEP = re.compile(r"(?:.*\.)?step")
# Equal on all ranks: Megatron's iteration, and DeepSpeed's number of parts of the weights.
_SHARED = re.compile(r"optimizer_state_dict\.partition_count(?:\.\d+)?|iteration")
_MOST_NAMED = 20


def check_one_save(evidence: Evidence) -> Iterator[Finding]:
    """Report optimizer states of ranks that do not belong together as errors.

    They count different steps, state different numbers of ranks, or count more steps than DeepSpeed's model states.
    """
    by_rank = [(f, evidence.checkpoint.inside(f.entry.key)) for f in evidence.scan.files if not f.structure.problems]
    by_rank = [(file, inside) for file, inside in by_rank if _BY_RANK.fullmatch(inside)]
    left = _left_of_former_saves(evidence) if by_rank else set()
    groups: dict[str, list[ScannedFile]] = {}
    for file, inside in by_rank:
        if file.entry.key not in left:
            kind = re.sub(r"_rank_\d[\d_]*", "_rank_#", inside)  # the folder of a tag keeps its digits
            groups.setdefault(kind, []).append(file)
    for files in groups.values():
        taken = {f.entry.key: _steps_taken(evidence, f) for f in files}
        steps = {key: count for key, count in taken.items() if count}  # a rank without weights takes none
        low, high = min(steps, key=steps.__getitem__, default=""), max(steps, key=steps.__getitem__, default="")
        if low and steps[low] != steps[high]:
            yield _error(low, f"its optimizer took {steps[low]:g} steps, that of {high} {steps[high]:g}")
        reported = {f.entry.key: [n.value for n in f.structure.leaves if _SHARED.fullmatch(n.name)] for f in files}
        first = files[0].entry.key
        for key in [key for key, shared in reported.items() if shared != reported[first]][:_MOST_NAMED]:
            yield _error(key, f"it states other ranks or another iteration than {first}")
        folder = low.rpartition("/")[0]
        stayed = (f for f in evidence.scan.files if f.entry.key not in left)
        beside = (leaf for f in stayed if f.entry.key.rpartition("/")[0] == folder for leaf in f.structure.leaves)
        counted = next((leaf.value for leaf in beside if leaf.name == "global_steps"), None)
        if low and counted is not None and steps[high] > counted:
            what = f"its optimizer took {steps[high]:g} steps, the model states beside it {counted:g}"
            yield _error(high, what)


def _error(key: str, what: str) -> Finding:
    return Finding("completeness", Severity.ERROR, f"{what}: they come from two saves", key)


def _left_of_former_saves(evidence: Evidence) -> set[str]:
    """Return the files of ranks that the last save did not have."""
    folders: dict[str, dict[str, ScannedFile]] = {}
    for file in evidence.scan.files:
        folder, _, name = file.entry.key.rpartition("/")
        folders.setdefault(folder, {})[name] = file
    left = set()
    for folder, files in folders.items():
        models = [files[name].structure for name in sorted(files) if name.endswith("_model_states.pt")]
        left |= {f"{folder}/{name}" for name in leftovers(files, models)}
    return left


def _steps_taken(evidence: Evidence, file: ScannedFile) -> float:
    """Return how many steps the optimizer in a file counts; 0 if it does not."""
    counts = [
        t.numbers.largest
        for t in evidence.tensors_of(file)
        if t.role == "optimizer" and not t.shape and t.numbers is not None and _STEP.fullmatch(t.name)
    ]
    counts += [
        leaf.value
        for leaf in file.structure.leaves
        if _STEP.fullmatch(leaf.name)
        and number_role(file.entry.key, leaf.name, file.structure.containers, file.structure.members) == "optimizer"
        and leaf.value > 0
    ]
    return max(counts, default=0.0)
