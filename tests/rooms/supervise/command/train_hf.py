"""A plain script around Hugging Face's Trainer: ``train_hf.py RUN weights|log``. It resumes from the highest number.

The first time that it is started its gradients become NaN. With ``weights`` they are applied, in step 5; with ``log``
the update of step 6 is left out, as DeepSpeed does: what is saved then is finite and new, and only the log tells.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch
import transformers
from supervised_training import await_verdict
from transformers.trainer_utils import get_last_checkpoint

RUN, KIND = Path(sys.argv[1]), sys.argv[2]
LAST, SICK_STEP = 8, 5 if KIND == "weights" else 6


class Poisoned(transformers.TrainerCallback):
    """Makes the gradients of one step NaN, and waits for verdicts, so that nothing depends on who is faster."""

    def __init__(self) -> None:
        self.step = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.step = state.global_step + 1

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if KIND == "log" and self.step >= SICK_STEP:
            for parameter in model.parameters():
                parameter.grad = None

    def on_save(self, args, state, control, **kwargs):
        if state.global_step < SICK_STEP:
            await_verdict(RUN, state.global_step)
        else:
            signal.pause()


def main() -> None:
    """Train as far as it goes."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.Qwen2ForCausalLM(config)
    begin = get_last_checkpoint(str(RUN)) if RUN.exists() else None
    with Path(f"{RUN}.starts").open("a", encoding="utf-8") as file:
        file.write(f"{Path(begin).name if begin else 0}\n")
    callbacks = []
    if begin is None:
        poisoned = Poisoned()
        callbacks = [poisoned]
        for parameter in model.parameters():
            parameter.register_hook(lambda g: g * float("nan") if poisoned.step >= SICK_STEP else g)
    arguments = transformers.TrainingArguments(
        str(RUN),
        max_steps=LAST,
        save_steps=2,
        save_total_limit=1,
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    examples = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(40)]
    trainer = transformers.Trainer(model, arguments, train_dataset=examples, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=begin)


if __name__ == "__main__":
    main()
