"""One file of a checkpoint is that of an earlier save: each file, of each earlier save, in each layout of folders."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.layouts import LAYOUT_WRITERS
from support.runs import QUICK

from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import Selection, verify_target

STEPS = (100, 200, 300)
GOOD, SUSPECT, BAD, INCOMPLETE = Outcome.GOOD, Outcome.SUSPECT, Outcome.BAD, Outcome.INCOMPLETE
# What tells that a file is of the save before, and of the one before that. The first pattern that fits counts.
NOTHING, ONCE, TWICE, OF_RANKS = (GOOD, GOOD), (SUSPECT, SUSPECT), (BAD, BAD), (INCOMPLETE, INCOMPLETE)
MAY_REST = (GOOD, SUSPECT)  # weights may be frozen, but they do not go back
_COMMON = {
    r"rng_state\.pth|random_states_\d\.pkl|custom_checkpoint_0\.pkl": NOTHING,  # nothing moves with them
    r"(?:.*/)?\.metadata": NOTHING,  # only the sizes of pickled numbers differ
}
_TRAINER = _COMMON | {
    r"(?:adapter_)?model\.safetensors": MAY_REST,
    r"trainer_state\.json": ONCE,  # its counter, and that of the optimizer
}
_OPTIMIZER = {
    r"optimizer\.(?:pt|bin)": TWICE,  # the weights, and the counters
    r"scheduler\.pt": ONCE,  # its learning rate, and that of the optimizer
    r"scheduler\.bin": NOTHING,  # its loop may have ended it
}
_ZERO = {
    r"(?:.*/)?bf16_zero_pp_rank_\d_mp_rank_00_optim_states\.pt": ONCE,  # the pieces of the other rank
    r"latest": OF_RANKS,  # it names another folder
}
_DCP = _COMMON | {
    r"__0_[0-2]\.distcp": MAY_REST,  # a matrix in a file of its own
    r"__0_[4-6]\.distcp": ONCE,  # its moment
    r"__0_[37]\.distcp": NOTHING,  # statistics and numbers
}
EVIDENCE = {
    "trainer": _TRAINER | _OPTIMIZER,
    "adapter": _TRAINER | _OPTIMIZER,
    # The counters of DeepSpeed and of Trainer; in an earlier save the moments of the ranks, too.
    "trainer-deepspeed": _TRAINER | _ZERO | {r".*model_states\.pt": (SUSPECT, BAD), r"scheduler\.pt": NOTHING},
    "accelerate": _TRAINER | _OPTIMIZER,
    "accelerate-deepspeed": _COMMON | _ZERO | {r".*model_states\.pt": (SUSPECT, BAD), r"scheduler\.bin": NOTHING},
    "accelerate-fsdp": _COMMON
    | {
        r"pytorch_model_fsdp_0/__0_[0-2]\.distcp": MAY_REST,
        r"optimizer_0/.*\.distcp": ONCE,
        r"pytorch_model_fsdp_0/__0_3\.distcp|scheduler\.bin": NOTHING,
    },
    "zero2": _ZERO | {r"mp_rank_00_model_states\.pt": ONCE},
    "zero3": _ZERO | {r".*model_states\.pt": OF_RANKS},
    "dcp": _DCP,
    "lightning-sharded": _DCP | {r"meta\.pt": ONCE},
    "megatron": {r"mp_rank_0\d/model_optim_rng\.pt": TWICE},
    "nanovlm": {r"model\.safetensors": NOTHING},  # alone with its configuration
    "pickle": {r"model\.safetensors|state\.pkl": NOTHING},
}


class Swaps:
    """A run with two verified saves, and a third one."""

    def __init__(self, layout: str, place: Path) -> None:
        self._run, apart = place / "run", place / "apart"
        write = LAYOUT_WRITERS[layout]
        self._names = [write(self._run, step, step) for step in STEPS[:2]]
        verify_target(str(self._run), QUICK, Selection(wait=0))
        self.name = write(apart, STEPS[2], STEPS[2])
        self._whole = apart / self.name
        shutil.copytree(self._whole, self._run / self.name)

    def judged(self) -> Outcome:
        """The verdict on the third save."""
        report = verify_target(str(self._run), QUICK, Selection(wait=0, record=False, step=STEPS[2]))
        (found,) = report.checkpoints
        return found.outcome

    def files(self) -> Iterator[tuple[str, tuple[Path, Path]]]:
        """The name of each file of the third save, with that of the save before and of the first one."""
        for path in sorted(self._whole.rglob("*")):
            inside = str(path.relative_to(self._whole))
            one, two = (
                self._run / name / inside.replace(str(STEPS[2]), str(step))
                for name, step in zip(self._names, STEPS[:2], strict=True)
            )
            if path.is_file() and path.read_bytes() != two.read_bytes():
                yield inside, (two, one)

    def with_files(self, *swapped: tuple[str, Path]) -> Outcome:
        """The verdict if these files are others."""
        for inside, other in swapped:
            shutil.copyfile(other, self._run / self.name / inside)
        found = self.judged()
        for inside, _ in swapped:
            shutil.copyfile(self._whole / inside, self._run / self.name / inside)
        return found


@pytest.mark.parametrize("layout", EVIDENCE)
def test_a_file_of_an_earlier_save(layout, tmp_path):
    """What evidence there is decides, and without evidence it stays good."""
    swaps = Swaps(layout, tmp_path)
    assert swaps.judged() is GOOD
    found = {inside: tuple(swaps.with_files((inside, other)) for other in others) for inside, others in swaps.files()}
    patterns = {**EVIDENCE[layout], ".*": None}
    assert found == {
        inside: next(told for pattern, told in patterns.items() if re.fullmatch(pattern, inside)) for inside in found
    }


@pytest.mark.parametrize("layout", ["zero2", "zero3", "accelerate-deepspeed", "accelerate-fsdp"])
def test_the_optimizer_of_all_ranks_of_an_earlier_save(layout, tmp_path):
    """No rank differs from the others, but the counters and the weights do."""
    swaps = Swaps(layout, tmp_path)
    names = [(name, others) for name, others in swaps.files() if re.search(r"optim_states|optimizer_0/__", name)]
    assert names
    found = {swaps.with_files(*((name, others[n]) for name, others in names)) for n in (0, 1)}
    assert found <= {SUSPECT, BAD}


def test_all_files_of_an_earlier_save(tmp_path):
    """They are a save that was written twice."""
    swaps = Swaps("trainer", tmp_path)
    assert [swaps.with_files(*((name, others[n]) for name, others in swaps.files())) for n in (0, 1)] == [GOOD, GOOD]
