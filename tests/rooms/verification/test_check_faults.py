"""Each check through a verification of real files: what it finds, what it costs, and who lifts it."""

from __future__ import annotations

import itertools
import json
import math
import operator
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import save_file
from support.views import look

import ckptguard
from ckptguard.errors import RefusedError
from ckptguard.keep.quarantine import quarantine
from ckptguard.records.run import Run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.runs.results import Checked
from ckptguard.values.verdict import Finding, Outcome, Severity
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.verification.user_decisions import accept, clear

State = dict[str, Any]


def weights(seed: int) -> State:
    """A small model with a batch norm's statistics."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(16, 16, generator=generator),
        "b.weight": torch.randn(16, 16, generator=generator),
        "bn.running_mean": torch.randn(16, generator=generator),
    }


def moments(seed: int, count: int = 2) -> State:
    """What Adam keeps."""
    generator = torch.Generator().manual_seed(1000 + seed)
    states = {
        i: {"step": torch.tensor(float(seed)), "exp_avg": torch.randn(16, 16, generator=generator)}
        for i in range(count)
    }
    return {"state": states, "param_groups": [{"lr": 0.1, "params": list(range(count))}]}


def save(run: Run, step: int, state: State) -> str:
    """One torch file."""
    name = f"net-{step}.pt"
    torch.save(state, Path(run.url) / name)
    return name


def verify(run: Run, path: str, **more: Any) -> Checked:
    """The verdict on what lies there now."""
    checkpoint = look(run).checkpoint(path)
    assert checkpoint is not None
    return verify_checkpoint(look(run), checkpoint, Verification(**more))


def of(checked: Checked, check: str) -> list[Finding]:
    """The findings of one check."""
    return [f for f in checked.findings if f.check == check]


def both(model: int, optimizer: int, **more: Any) -> State:
    """A model and its optimizer."""
    return {"model": weights(model), "optimizer": moments(optimizer), **more}


def stuck(step: int) -> State:
    """A save in which only the forward pass and the counters went on."""
    state = both(1, 1)
    state["model"]["bn.running_mean"] = torch.full((16,), float(step)) + torch.arange(16)
    for entry in state["optimizer"]["state"].values():
        entry["step"] = torch.tensor(float(step))
    return state


def test_stale_twice_in_a_row_is_suspect_until_it_is_cleared(run: Run) -> None:
    """The first time is a notice, the second is suspicion of the generation; re-verifying keeps it, clearing lifts it
    for good, and damage is still damage afterwards."""
    assert verify(run, save(run, 1, both(1, 1))).outcome is Outcome.GOOD
    first = verify(run, save(run, 2, stuck(2)))
    assert (first.outcome, [f.severity for f in of(first, "stale")]) == (Outcome.GOOD, [Severity.NOTICE])
    path = save(run, 3, stuck(3))
    second = verify(run, path)
    assert (second.outcome, [f.severity for f in of(second, "stale")]) == (Outcome.SUSPECT, [Severity.SICKNESS])
    assert str(find_known_good(run).id) == "2.1"
    names = load_history(run).names
    assert verify(run, path).outcome is Outcome.SUSPECT
    assert load_history(run).names == names

    clear(look(run), path, reason="a pause on purpose")
    for _ in range(2):
        assert verify(run, path).outcome is Outcome.GOOD
    assert str(find_known_good(run).id) == "3.1"
    with pytest.raises(RefusedError):
        clear(look(run), path, reason="again")
    whole = (Path(run.url) / path).read_bytes()
    (Path(run.url) / path).write_bytes(whole[:-9])
    assert verify(run, path).outcome is Outcome.BAD


def test_suspicion_stays_when_its_evidence_is_gone(run: Run) -> None:
    """What it was compared with was put aside meanwhile."""
    for step in (1, 2, 3):
        verify(run, save(run, step, stuck(step)))
    quarantine(look(run), "net-2.pt", reason="test", suspect=False)
    quarantine(look(run), "net-1.pt", reason="test", suspect=False)
    again = verify(run, "net-3.pt")
    assert again.outcome is Outcome.SUSPECT
    assert [f.severity for f in of(again, "stale")] == [Severity.SICKNESS]


def test_a_new_incident_suspects_a_cleared_checkpoint_again(run: Run) -> None:
    """A clearance lifts what is known, not what comes."""
    for step in (1, 2, 3):
        verify(run, save(run, step, stuck(step)))
    clear(look(run), "net-3.pt", reason="fine")
    data = (Path(run.url) / "net-3.pt").read_bytes()
    id = quarantine(look(run), "net-3.pt", reason="loss is nan")
    current_verdict = load_history(run).current_verdicts("net-#.pt")[id]
    assert current_verdict.outcome is Outcome.SUSPECT
    (Path(run.url) / "net-3.pt").write_bytes(data)
    assert str(verify(run, "net-3.pt").id) == "3.2"


@pytest.mark.parametrize("evidence", ["skipped", "scaler", "gradient"])
def test_stale_with_evidence_is_suspect_at_once(run: Run, evidence: str) -> None:
    """DeepSpeed's counter in its model states, a collapsed loss scale, a logged NaN."""
    for step in (1, 2):
        folder = Path(run.url) / f"checkpoint-{step}"
        folder.mkdir()
        save_file(weights(1), folder / "model.safetensors")
        torch.save(moments(1), folder / "optimizer.pt")
        torch.save({"last_epoch": step}, folder / "scheduler.pt")
        log: dict[str, Any] = {"loss": 0.1}
        if evidence == "gradient":
            log["grad_norm"] = math.nan if step == 2 else 0.2
        if evidence == "scaler":
            scale = {"scale": 0.5 if step == 2 else 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5}
            torch.save(scale, folder / "scaler.pt")
        if evidence == "skipped":
            torch.save({"skipped_steps": 4 * step, "dp_world_size": 1}, folder / "states.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": [log]}))
        checked = verify(run, folder.name)
        assert checked.outcome is (Outcome.GOOD if step == 1 else Outcome.SUSPECT), checked.findings


def test_clean_runs_that_rest_are_not_suspect(run: Run) -> None:
    """Weights alone with a learning rate of 0 in warm-up; a frozen module in a series of its own; moments that move
    although the weights do not."""
    for step in (1, 2, 3, 4):
        assert verify(run, save(run, step, weights(1))).outcome is Outcome.GOOD
    for step in (5, 6, 7):
        torch.save(both(1, step), Path(run.url) / f"full-{step}.pt")
        checked = verify(run, f"full-{step}.pt")
        assert (checked.outcome, of(checked, "stale")) == (Outcome.GOOD, [])


def test_a_rollback_does_not_count_as_the_step_before(run: Run) -> None:
    """What was put aside is not what training went on from."""
    verify(run, save(run, 1, both(1, 1)))
    verify(run, save(run, 2, both(2, 2)))
    quarantine(look(run), "net-2.pt", reason="loss is nan")
    checked = verify(run, save(run, 3, both(2, 2)))
    assert of(checked, "stale") == []


def test_drift_is_told_and_stays_good(run: Run) -> None:
    """One weight blown up a hundredfold."""
    verify(run, save(run, 1, weights(1)))
    state = weights(2)
    state["b.weight"] *= 100
    checked = verify(run, save(run, 2, state))
    [finding] = of(checked, "drift")
    assert (checked.outcome, finding.severity, finding.tensor) == (Outcome.GOOD, Severity.NOTICE, "b.weight")
    assert of(verify(run, save(run, 3, weights(3))), "drift")[0].tensor == "b.weight"
    assert of(verify(run, save(run, 4, weights(4))), "drift") == []


def test_frozen_layers_are_suspect_until_they_are_accepted(run: Run) -> None:
    """It is a question, and accepting answers it."""
    verify(run, save(run, 1, both(1, 1)))
    path = save(run, 2, {"model": weights(2), "optimizer": moments(2, count=1)})
    checked = verify(run, path)
    assert checked.outcome is Outcome.SUSPECT
    assert [f.count for f in of(checked, "schema")] == [2]
    accept(look(run), "2")
    assert verify(run, path).outcome is Outcome.GOOD
    assert verify(run, save(run, 3, {"model": weights(3), "optimizer": moments(3, count=1)})).outcome is Outcome.GOOD


OPTIMIZERS = {
    "AdamW": lambda of: torch.optim.AdamW(of),
    "amsgrad": lambda of: torch.optim.AdamW(of, amsgrad=True),
    "Adagrad": lambda of: torch.optim.Adagrad(of),
    "momentum": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9),
    "plain": lambda of: torch.optim.SGD(of, lr=0.1),
    "Rprop": lambda of: torch.optim.Rprop(of),
}


def save_with(root: Path, step: int, how: str, optimizer: str) -> str:
    """A model after one update by this optimizer: all in a file, in files of a folder, or by the guard."""
    model = torch.nn.Linear(4, 4)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    chosen.step()
    if how == "guard":
        guard = ckptguard.TrainingGuard(root, model=model, optimizer=chosen, daemon=None)
        guard.save(step=step)
        guard.close()
        return f"step-{step:09d}"
    state = {"model": model.state_dict(), "optimizer": chosen.state_dict()}
    if how == "file":
        torch.save(state, root / f"net-{step}.pt")
        return f"net-{step}.pt"
    folder = root / f"states-{step}"
    folder.mkdir()
    torch.save(state["model"], folder / "model.pt")
    name = "optimizer" if how == "folder" else f"optimizer_{optimizer}"
    torch.save(state["optimizer"], folder / f"{name}.pt")
    return folder.name


@pytest.mark.parametrize("how", ["file", "folder", "names", "guard"])
@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(OPTIMIZERS, 2)])
def test_another_optimizer_is_a_question_at_most(run: Run, how: str, first: str, second: str) -> None:
    """Never BAD or INCOMPLETE, in whatever files its state lies; the question has an answer, and then it is over."""
    root = Path(run.url)
    assert verify(run, save_with(root, 1, how, first)).outcome is Outcome.GOOD
    path = save_with(root, 2, how, second)
    checked = verify(run, path)
    assert checked.outcome in (Outcome.GOOD, Outcome.SUSPECT), checked.findings
    if checked.outcome is Outcome.SUSPECT:
        assert {f.check for f in checked.findings if f.severity is Severity.SICKNESS} == {"schema"}
        assert accept(look(run), path).outcome is Outcome.GOOD
    assert verify(run, path).outcome is Outcome.GOOD
    assert verify(run, save_with(root, 3, how, second)).outcome is Outcome.GOOD


def test_a_swapped_rank_is_named_whatever_its_place(run: Run) -> None:
    """Two ranks with the same names; each in turn gets other shapes."""
    for step, broken in ((1, None), (2, 0), (3, 1)):
        folder = Path(run.url) / f"step-{step}"
        folder.mkdir()
        for rank in range(2):
            shape = (9, 9) if broken == rank else (4 + rank, 8)
            torch.save({"w": torch.randn(*shape)}, folder / f"mp_rank_{rank:02d}.pt")
        checked = verify(run, folder.name)
        assert [f.found for f in of(checked, "schema")] == ([] if broken is None else ["[9, 9]"])
        assert checked.outcome is (Outcome.GOOD if broken is None else Outcome.SUSPECT)


def test_settings_in_a_namespace_are_no_alarm(run: Run) -> None:
    """types.SimpleNamespace holds values; a method caller runs things."""
    checked = verify(run, save(run, 1, both(1, 1, args=types.SimpleNamespace(lr=0.1))))
    assert (checked.outcome, of(checked, "pickle-safety")) == (Outcome.GOOD, [])

    folder = Path(run.url) / "other"
    folder.mkdir()
    torch.save({"w": torch.randn(4, 4)}, folder / "weights-1.pt")
    torch.save({"w": torch.randn(4, 4), "x": operator.methodcaller("clear")}, folder / "weights-2.pt")
    verify(run, "other/weights-1.pt")
    armed = verify(run, "other/weights-2.pt")
    assert armed.outcome is Outcome.BAD
    assert [f.found for f in of(armed, "pickle-safety")] == ["operator.methodcaller"]
