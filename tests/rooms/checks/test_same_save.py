"""Files of two saves of DeepSpeed in one folder, each of them whole: told by what the ranks' files count."""

from pathlib import Path

import pytest
import torch
from support.layouts import zero_files
from support.runs import QUICK

from ckptguard.runs.results import Checked
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target


def save(run: Path, step: int, ranks: int, *, stage: int = 2, name: str = "tag", into: int = 0) -> Path:
    """A tag of so many ranks, as the fixtures write it for two; `into` cuts the weights for other ranks."""
    place = run / name
    other = run.parent / f"{run.name}-{step}-{ranks}-{into}"
    zero_files(other, step, step, stage=stage)
    place.mkdir(parents=True, exist_ok=True)
    for path in sorted(other.iterdir()):
        state = torch.load(path, weights_only=False)
        if "dp_world_size" in state:
            state["dp_world_size"] = ranks
        else:
            inner = state["optimizer_state_dict"]
            inner["partition_count"] = [into or ranks]
            inner["base_optimizer_state"]["state"][0]["step"] = torch.tensor(float(step))
        for rank in range(ranks):
            if "pp_rank_1" not in path.name:
                torch.save(state, place / path.name.replace("pp_rank_0", f"pp_rank_{rank}"))
    return place


def judged(run: Path) -> Checked:
    """At first sight."""
    (checked,) = verify_target(str(run), QUICK, Selection(wait=0, record=False)).checkpoints
    return checked


def heavy(checked: Checked) -> dict[str, Severity]:
    """The files that findings other than notices name."""
    return {f.file.rpartition("/")[2]: f.severity for f in checked.findings if f.file and f.severity.value != "notice"}


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_of_one_save_agree(stage, tmp_path):
    """GOOD without a word."""
    save(tmp_path / "run", 4, 3, stage=stage)
    checked = judged(tmp_path / "run")
    assert (checked.outcome, heavy(checked)) == (Outcome.GOOD, {})


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_file_of_a_former_save_is_found(stage, kind, tmp_path):
    """The tag was saved again, and the writer killed before the last rank."""
    new, old = save(tmp_path / "run", 4, 2, stage=stage), save(tmp_path / "old", 2, 2, stage=stage)
    name = sorted(p.name for p in new.iterdir() if f"_{kind}_" in p.name)[-1]
    (old / name).replace(new / name)
    checked = judged(tmp_path / "run")
    assert checked.outcome is Outcome.INCOMPLETE
    assert any("two saves" in f.message for f in checked.findings)


def test_a_rank_cut_for_others_is_found(tmp_path):
    """The same step, saved before by more ranks."""
    new, old = save(tmp_path / "run", 4, 2), save(tmp_path / "old", 4, 2, into=4)
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (old / name).replace(new / name)
    checked = judged(tmp_path / "run")
    assert (checked.outcome, heavy(checked)) == (Outcome.INCOMPLETE, {name: Severity.ERROR})


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_save_by_more_ranks_left_is_a_warning(stage, tmp_path):
    """DeepSpeed passes it over."""
    save(tmp_path / "run", 2, 4, stage=stage)
    place = save(tmp_path / "run", 4, 2, stage=stage)
    checked = judged(tmp_path / "run")
    left = {p.name for p in place.iterdir() if "rank_2" in p.name or "rank_3" in p.name}
    assert checked.outcome is Outcome.GOOD
    assert heavy(checked) == dict.fromkeys(left, Severity.WARNING)


def test_a_rank_of_megatron_of_another_iteration_is_found(tmp_path):
    """It has no optimizer that counts steps here."""
    for rank in (0, 1):
        place = tmp_path / "run/iter_0000010" / f"mp_rank_0{rank}"
        place.mkdir(parents=True)
        args = {"tensor_model_parallel_size": 2}
        state = {"args": args, "iteration": 10 - rank, "model": {"w": torch.ones(4, 4) + rank}}
        torch.save(state, place / "model_optim_rng.pt")
    checked = judged(tmp_path / "run")
    assert (checked.outcome, heavy(checked)) == (Outcome.INCOMPLETE, {"model_optim_rng.pt": Severity.ERROR})
