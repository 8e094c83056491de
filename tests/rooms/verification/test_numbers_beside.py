"""Numbers and bytes beside the tensors: a dead loss scale, NaN of a layer's own state, averages, files of settings."""

import io
import pickle
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.layouts import trainer_files, weights
from support.runs import QUICK, save_file

from ckptguard.runs.results import Checked
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target

NAN = float("nan")


def judged(run: Path, state: object, name: str = "ckpt-100.pt") -> Checked:
    """A file of it, judged at first sight."""
    torch.save(state, run / name)
    (checked,) = verify_target(str(run), QUICK, Selection(wait=0, record=False)).checkpoints
    return checked


def heavy(checked: Checked) -> list[tuple[Severity, str | None]]:
    """Its findings that are no notices."""
    return [(f.severity, f.tensor) for f in checked.findings if f.severity is not Severity.NOTICE]


def grad_scaler(scale: float) -> dict[str, object]:
    """What torch's GradScaler saves."""
    return {"scale": scale, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, float("inf")])
def test_a_dead_loss_scale_is_bad(scale, tmp_path):
    """Halved until nothing was left: every update after a resume is left out."""
    checked = judged(tmp_path, {"model": weights(1), "scaler": grad_scaler(scale)})
    assert (checked.outcome, heavy(checked)) == (Outcome.BAD, [(Severity.ERROR, "scaler.scale")])


def test_other_scales_are_no_alarm(tmp_path):
    """0 stands for a dynamic scale in configurations; a disabled scaler saves nothing."""
    state = {
        "model": weights(1),
        "scaler": {},
        "ds_config": {"fp16": {"loss_scale": 0}},
        "amp": grad_scaler(1.0),
        "loss": {"scale": 0.0},
    }
    assert heavy(judged(tmp_path, state)) == []


def test_nan_in_the_extra_state_of_a_layer_is_bad(tmp_path):
    """It is a number, not a tensor, but of the model."""
    state = {"model": {**weights(1), "layers.0._extra_state": {"amax": NAN}}, "loss": NAN}
    checked = judged(tmp_path, state)
    assert (checked.outcome, heavy(checked)) == (
        Outcome.BAD,
        [(Severity.ERROR, "model.layers.0._extra_state.amax")],
    )


def packed_states() -> dict[str, object]:
    """Ways to hold a file in a state dict."""
    buffer = io.BytesIO()
    torch.save({"scale": torch.tensor([NAN])}, buffer)
    raw = buffer.getvalue()
    return {
        "bytes": raw,
        "file": io.BytesIO(raw),
        "pickle": pickle.dumps({"scale": NAN}),
        "tensor": torch.frombuffer(bytearray(raw), dtype=torch.uint8),
    }


@pytest.mark.parametrize("kind", sorted(packed_states()))
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_in_the_state_is_looked_into(kind, protocol, tmp_path):
    """A NaN in it is one of the model, in whatever way the file is held."""
    state = {"model": {**weights(1), "_extra_state": packed_states()[kind]}}
    torch.save(state, tmp_path / "ckpt-100.pt", pickle_protocol=protocol)
    (checked,) = verify_target(str(tmp_path), QUICK, Selection(wait=0, record=False)).checkpoints
    assert {s for s, name in heavy(checked) if name and name.startswith("model._extra_state")} == {Severity.ERROR}


def test_an_average_of_the_weights_is_state_wherever_it_lies(tmp_path):
    """Lightning keeps those of callbacks beside scores that may well be infinite."""
    callbacks = {"EMA": {"ema_weights": {"w": torch.tensor([[1.0, NAN]])}}, "best": {"score": torch.tensor(NAN)}}
    checked = judged(tmp_path, {"state_dict": weights(1), "callbacks": callbacks})
    assert heavy(checked) == [(Severity.ERROR, "callbacks.EMA.ema_weights.w")]


def test_files_of_settings_and_counters_are_no_alarm(tmp_path):
    """One file for each thing, in one folder; an optimizer without momentum keeps no tensor."""
    for step in (1, 2):
        torch.save(weights(step), tmp_path / f"model_{step}.pt")
        torch.save({"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}, tmp_path / f"optimizer_{step}.pt")
        torch.save({"step": step, "seen": [1, 2]}, tmp_path / f"meta_{step}.pt")
        torch.save({"lr": 0.1}, tmp_path / f"args_{step}.pt")
    (tmp_path / "tokens.bin").write_bytes(bytes(range(256)) * 8)
    report = verify_target(str(tmp_path), QUICK, Selection(wait=0))
    assert {c.path: c.outcome for c in report.checkpoints if c.outcome is not Outcome.GOOD} == {}


EMPTY: list[object] = [{}, {"model": {}, "epoch": 3}, {"state_dict": {}, "optimizer": {"state": {}}}]


@pytest.mark.parametrize(("name", "state"), [*(("net-7.pt", s) for s in EMPTY), ("ckpt-7.pt", {"epoch": 3})])
def test_weights_that_are_not_there_are_missed(name, state, tmp_path):
    """A rank that had none to save wrote the file."""
    assert judged(tmp_path, state, name).outcome is Outcome.INCOMPLETE


def test_an_archive_of_arrays_without_arrays_is_no_checkpoint(tmp_path):
    """Whatever else it holds, and whatever it is called."""
    with zipfile.ZipFile(tmp_path / "weights.npz", "w") as archive:
        archive.writestr("notes.txt", "no array")
    assert verify_target(str(tmp_path / "weights.npz"), QUICK, Selection(wait=0)).outcome is Outcome.INCOMPLETE


def test_garbage_named_as_a_step_is_no_checkpoint(tmp_path):
    """A .bin of any name may be of another kind; one that states a step was to be a checkpoint."""
    (tmp_path / "epoch_5.bin").write_bytes(bytes(range(1, 256)) * 8)
    assert verify_target(str(tmp_path), QUICK, Selection(wait=0)).outcome is Outcome.INCOMPLETE


def test_moments_that_are_zero_are_no_unwritten_tail(tmp_path):
    """The last weight of the file gets no gradient yet."""
    for step in (1, 2):
        place = tmp_path / f"checkpoint-{step}"
        place.mkdir()
        save_file(weights(step), place / "model.safetensors")
        trainer_files(place, step, step)
        zeros = {"z.exp_avg": torch.zeros(24, 16), "a.exp_avg": torch.full((24, 16), float(step))}
        safetensors.torch.save_file(zeros, place / "optimizer.safetensors")
    report = verify_target(str(tmp_path), QUICK, Selection(wait=0))
    assert [heavy(c) for c in report.checkpoints] == [[], []]
