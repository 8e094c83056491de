"""Hugging Face's Trainer with the callback: no poisoned save, and a message that names the way back."""

import logging

import pytest
from support.last_saves import recorded_outcome_of_last
from support.runs import QUICK

import ckptguard
from ckptguard.errors import SettingsError, SickTrainingError
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.tiny_trainer import Overflow, tiny_trainer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def trainer(output, *callbacks, **arguments):
    """A training of nine updates, of which every second one is saved."""
    return tiny_trainer(output, *callbacks, **({"max_steps": 9, "save_steps": 2} | arguments))


def saves(output):
    """Checkpoint folders."""
    return sorted(p.name for p in output.iterdir() if p.name.startswith("checkpoint-"))


def test_the_poisoned_save_is_vetoed_and_the_known_good_named(tmp_path):
    """Weights overflow at step 6, whose save is vetoed; the error names checkpoint-4, which verifies."""
    guarded = trainer(tmp_path / "out", Overflow(6))
    guarded.add_callback(ckptguard.integrations.transformers.GuardCallback(settings=QUICK))
    with pytest.raises(SickTrainingError) as caught:
        guarded.train()
    assert saves(tmp_path / "out") == ["checkpoint-2", "checkpoint-4"]
    assert caught.value.known_good == str(tmp_path / "out" / "checkpoint-4")
    assert "checkpoint-4" in caught.value.message
    assert verify_target(caught.value.known_good, QUICK).outcome is Outcome.GOOD
    [incident] = list_incidents(open_run(str(tmp_path / "out")))
    assert (incident.step, incident.state, incident.known_good) == (6, "open", "4.1")
    details = incident.known_details()
    assert [s.step for s in details.samples] == [1, 2, 3, 4, 5]  # the Trainer logs a step after its end
    assert (details.training.optimizer, details.training.autocast) == ("AdamW", "off")
    assert {t.kind for t in details.tensors} >= {"weight"}
    assert (details.last_good.id, len(details.causes) > 0) == ("4.1", True)
    report = tmp_path / "out" / "_ckptguard" / "incidents" / f"{incident.id}.txt"
    assert "ckptguard rollback" in report.read_text()
    resumed = trainer(tmp_path / "out")
    resumed.train(resume_from_checkpoint=caught.value.known_good)
    assert all(torch.isfinite(p).all() for p in resumed.model.parameters())


def test_rotation_cannot_outrun_it(tmp_path):
    """save_total_limit=1 and no daemon at all: the one good save is protected when it is written."""
    guarded = trainer(tmp_path / "out", Overflow(6), save_total_limit=1)
    guarded.add_callback(ckptguard.integrations.transformers.GuardCallback(settings=QUICK, daemon="off"))
    with pytest.raises(SickTrainingError) as caught:
        guarded.train()
    assert caught.value.known_good is not None
    assert verify_target(str(tmp_path / "out"), QUICK).outcome is Outcome.GOOD


def test_stop_instead_of_raise(tmp_path, caplog):
    """on_sick="stop": train() returns, the log and the callback say why."""
    callback = ckptguard.integrations.transformers.GuardCallback(settings=QUICK, daemon="off", on_sick="stop")
    guarded = trainer(tmp_path / "out", Overflow(6))
    guarded.add_callback(callback)
    with caplog.at_level(logging.ERROR, logger="ckptguard"):
        guarded.train()
    assert callback.sick is not None
    assert callback.sick.known_good in caplog.text
    assert guarded.state.global_step < 9


def test_a_healthy_run_is_left_alone(tmp_path):
    """No veto, no stop, every save GOOD; the final model can be saved as ever."""
    callback = ckptguard.integrations.transformers.GuardCallback(settings=QUICK, daemon="off")
    guarded = trainer(tmp_path / "out", max_steps=6)
    guarded.add_callback(callback)
    guarded.train()
    guarded.save_model()
    assert callback.sick is None
    assert saves(tmp_path / "out") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert recorded_outcome_of_last(tmp_path / "out") is Outcome.GOOD
    assert verify_target(str(tmp_path / "out"), QUICK).outcome is Outcome.GOOD


def test_trouble_of_ours_never_ends_training(tmp_path, monkeypatch, caplog):
    """Nothing can be recorded: a warning, and training goes on to its end."""
    from ckptguard.errors import DeniedError
    from ckptguard.keep import copies

    def denied(run, copy):
        raise DeniedError("permission denied", key="kept")

    monkeypatch.setattr(copies, "commit_kept", denied)
    guarded = trainer(tmp_path / "out", max_steps=4)
    guarded.add_callback(ckptguard.integrations.transformers.GuardCallback(settings=QUICK, daemon="off"))
    guarded.train()
    assert guarded.state.global_step == 4
    assert "permission denied" in caplog.text


def test_nonsense_is_refused_at_once():
    """Settings that cannot be true."""
    with pytest.raises(SettingsError):
        ckptguard.integrations.transformers.GuardCallback(on_sick="ignore")
    with pytest.raises(SettingsError):
        ckptguard.integrations.transformers.GuardCallback(policy=ckptguard.RollbackPolicy(check_every=0))
    with pytest.raises(TypeError, match="check_every"):
        ckptguard.integrations.transformers.GuardCallback(check_every=1)


def test_saves_that_only_an_evaluation_decides_about(tmp_path):
    """save_strategy="best": the save is decided after on_step_end, and still no poisoned folder is left as newest."""
    guarded = trainer(
        tmp_path / "out",
        Overflow(5),
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=500,
        metric_for_best_model="loss",
        greater_is_better=True,
    )
    guarded.add_callback(ckptguard.integrations.transformers.GuardCallback(settings=QUICK, daemon="off"))
    with pytest.raises(SickTrainingError) as caught:
        guarded.train()
    steps = sorted(int(name.rpartition("-")[2]) for name in saves(tmp_path / "out"))
    assert max(steps, default=0) <= 5
    if caught.value.known_good is not None:
        assert verify_target(caught.value.known_good, QUICK).outcome is Outcome.GOOD


def test_a_sick_model_never_leaves_train_quietly(tmp_path):
    """No save, no log, no check in between: the end of training still looks."""
    guarded = trainer(tmp_path / "out", Overflow(5), save_strategy="no", logging_steps=500)
    guarded.add_callback(ckptguard.integrations.transformers.GuardCallback(settings=QUICK, daemon="off"))
    with pytest.raises(SickTrainingError):
        guarded.train()
    assert saves(tmp_path / "out") == []
