"""Hugging Face's Trainer keeps one checkpoint, and every save after some step is poisoned: the good one survives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.daemon_process import DaemonProcess
from support.views import look

from ckptguard.inspect.list_states import survey
from ckptguard.recover.restore import restore
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAST_GOOD_STEP = 4


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a checkpoint."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Saboteur(transformers.TrainerCallback):
    """Waits for the verdict of each healthy save, then drives the weights to overflow by the learning rate alone."""

    def __init__(self, output: Path, daemon: DaemonProcess) -> None:
        self.output, self.daemon = output, daemon
        self.healthy: dict[str, bytes] = {}

    def on_save(self, args, state, control, **kwargs):
        if state.global_step <= LAST_GOOD_STEP:
            self.healthy = content(self.output / f"checkpoint-{state.global_step}")
            self.daemon.known_good(state.global_step)

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == LAST_GOOD_STEP:
            for group in optimizer.param_groups:
                group["lr"] = 1e38


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_rotation_with_one_checkpoint_and_poisoned_saves(tmp_path, start):
    """save_total_limit=1: when training ends only poisoned folders are in place, and the known-good restores byte
    for byte from its kept copy."""
    output = tmp_path / "out"
    output.mkdir()
    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(40)]
    arguments = transformers.TrainingArguments(
        str(output),
        max_steps=10,
        save_steps=2,
        save_total_limit=1,
        per_device_train_batch_size=2,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=100,
    )
    saboteur = Saboteur(output, start(output))
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[saboteur])
    trainer.train()
    _, answer = saboteur.daemon.ask("known-good?wait_seconds=60")
    in_place = [s for s in survey(look(str(output), Settings())) if s.in_place]
    assert [(s.step, s.outcome) for s in in_place] == [(10, Outcome.BAD)]
    assert (answer["step"], answer["kept"]) == (LAST_GOOD_STEP, True)
    restored = restore(look(str(output), Settings()), str(tmp_path / "restored"))
    assert os.path.basename(restored.path) == f"checkpoint-{LAST_GOOD_STEP}"
    assert content(Path(restored.path)) == saboteur.healthy
