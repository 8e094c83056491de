"""Check what a resume from this checkpoint would restore, and on how many ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from functools import partial

from ckptguard.checks.evidence import Evidence
from ckptguard.layouts.deepspeed import stated_world
from ckptguard.layouts.roles import file_role, number_role
from ckptguard.values.verdict import Finding, Severity

ROLES = ("model", "optimizer", "scheduler", "scaler", "rng", "data")
_LOST_SILENTLY = frozenset(("scheduler", "scaler", "rng", "data"))
_OF_TRAINERS = frozenset(("trainer_state.json", "training_args.bin"))
_finding = partial(Finding, "resumable")
_PARTITION = re.compile(r".*zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")


def check_resumable(evidence: Evidence) -> Iterator[Finding]:
    """Report what a resume would lose.

    A notice if a training's checkpoint holds only weights, because the optimizer would restart silently. A warning if
    it lacks what the reference would restore. A notice if a resume needs the same number of ranks.
    """
    present = roles_present(evidence)
    if evidence.thinned:
        yield _finding(Severity.NOTICE, f"it is thinned: a resume would restart: {', '.join(taken_from(evidence))}")
    elif "model" in present and "optimizer" not in present:
        if _is_of_a_training(evidence, frozenset(present)):
            yield _finding(Severity.NOTICE, "it holds no optimizer state: a resume would restart the optimizer")
    elif evidence.reference is not None and evidence.reference_facts is not None:
        # A missing file is already a finding of completeness.
        filed = {file_role(f.path) for f in evidence.reference.files}
        before = evidence.reference_facts.resumable
        lost = [r for r in before if r in _LOST_SILENTLY and r not in present and r not in filed]
        if lost:
            where = f"{evidence.reference.path}{evidence.reference.id.nth_save}"
            yield _finding(Severity.WARNING, f"a resume would restart: {', '.join(lost)} (which {where} holds)")
    world = stated_world_size(evidence)
    if world is not None and any(_PARTITION.fullmatch(key) for key in evidence.checkpoint.files):
        yield _finding(
            Severity.NOTICE, f"a resume needs {world} ranks, as many as saved it: DeepSpeed accepts no other number"
        )


def _is_of_a_training(evidence: Evidence, present: Set[str]) -> bool:
    """True if someone may resume from it: the run had optimizer state before, or a trainer's files are beside the
    weights. A downloaded model is not for a resume."""
    before = (evidence.reference_facts, evidence.previous_facts)
    if any("optimizer" in facts.resumable for facts in before if facts is not None):
        return True
    names = (evidence.checkpoint.inside(key) for key in evidence.checkpoint.files)
    return not present.isdisjoint(_LOST_SILENTLY) or any(name in _OF_TRAINERS for name in names)


def taken_from(evidence: Evidence) -> tuple[str, ...]:
    """Return the roles that thinning took from it."""
    from ckptguard.layouts.thinning import roles_taken  # few are thinned

    return roles_taken(path for path, *_ in evidence.thinned)


def roles_present(evidence: Evidence) -> tuple[str, ...]:
    """Return the roles of this checkpoint's files, tensors or numbers, in a fixed order."""
    found = {t.role for t in evidence.tensors()} | {file_role(f.entry.key) for f in evidence.scan.files}
    found |= {
        number_role(f.entry.key, leaf.name, f.structure.containers, f.structure.members)
        for f in evidence.scan.files
        for leaf in f.structure.leaves
    }
    return tuple(role for role in ROLES if role in found)


def stated_world_size(evidence: Evidence) -> int | None:
    """Return how many ranks saved it, if a file says so (DeepSpeed's model states do)."""
    worlds = (stated_world(file.structure) for file in evidence.scan.files)
    return next((data * model for data, model in filter(None, worlds)), None)
