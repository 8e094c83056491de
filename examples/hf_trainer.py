"""Hugging Face Trainer with ckptguard: one update of a tiny model overflows. Training goes back and leaves it out, or
with --stop is stopped before the poisoned save.

python examples/hf_trainer.py [--stop] [RUN]
"""

import argparse
import tempfile

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ckptguard


class TooFast(TrainerCallback):
    """What goes wrong in this example: at step 6 the learning rate is far too high, whenever it is made."""

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == 5:
            for group in optimizer.param_groups:
                group["lr"] = 3e38


def make_trainer(run: str) -> Trainer:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Trainer(
        Qwen2ForCausalLM(config),
        TrainingArguments(
            run, max_steps=10, save_steps=2, save_total_limit=1, logging_steps=1, report_to=[], use_cpu=True
        ),
        train_dataset=[{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(100)],
        callbacks=[TooFast()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--stop", action="store_true")
    options = parser.parse_args()
    trainer = make_trainer(options.run or tempfile.mkdtemp(prefix="hf-run-"))
    if not options.stop:
        ckptguard.integrations.transformers.train(trainer)  # instead of trainer.train()
        finite = all(torch.isfinite(p).all() for p in trainer.model.parameters())
        print(f"trained to step {trainer.state.global_step}; every weight is finite: {finite}")
        return
    trainer.add_callback(ckptguard.integrations.transformers.GuardCallback())  # the one line
    try:
        trainer.train()
    except ckptguard.SickTrainingError as sick:
        print(sick)
        print("to go on:", sick.hint)


if __name__ == "__main__":
    main()
