"""Qwen2: supervised fine-tuning in fp16 with Hugging Face's Trainer. The log shows a loss of 0; the loss is NaN.

python examples/cases/qwen2.py [FOLDER]

AdamW divides by the root of the second moment plus 1e-8, and in fp16 both may be 0: weights become 0/0. The Trainer
logs a loss of 0, goes on, and saves; `save_total_limit` deletes what was good, and a plain restart takes the highest
number, which is poisoned. Here a run that is well by step 10 is continued in fp16: plainly, then guarded, then mended
as the report advises. Going back cannot help against a setting: it saves what was good, and the report says what to
change.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments
from transformers import logging as hf_logging

import ckptguard


def conversations() -> list[dict[str, list[int]]]:
    """Short prompts and the answers to them; the prompt's labels are masked."""
    made = []
    for number in range(30):
        prompt = [1 + (number + i) % 7 for i in range(4)]
        answer = [20 + number % 3] * 8
        made.append({"input_ids": prompt + answer, "labels": [-100] * 4 + answer})
    return made


def make_trainer(output: str, steps: int, dtype: torch.dtype) -> Trainer:
    """As in Qwen's own script, but for a tiny model with random weights."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    arguments = TrainingArguments(
        output,
        per_device_train_batch_size=1,
        max_steps=steps,
        learning_rate=3e-3,
        optim="adamw_torch",
        save_steps=5,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        train_sampling_strategy="sequential",
    )
    model = Qwen2ForCausalLM(config).to(dtype)
    return Trainer(model=model, args=arguments, train_dataset=conversations())


def bad_weights(trainer: Trainer) -> str:
    """How many weights hold NaN."""
    bad = [not value.isfinite().all() for value in trainer.model.state_dict().values()]
    return f"{sum(bad)} of {len(bad)}"


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="qwen2-")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    hf_logging.set_verbosity_error()
    run = f"{folder}/guarded"
    train = ckptguard.integrations.transformers.train

    print("--- 10 steps that are well, in fp32")
    train(make_trainer(run, 10, torch.float32))

    print("--- continued plainly, in fp16")
    shutil.copytree(run, f"{folder}/plain", ignore=shutil.ignore_patterns("_ckptguard"))
    plain = make_trainer(f"{folder}/plain", 20, torch.float16)
    plain.train(resume_from_checkpoint=True)
    losses = [round(entry["loss"], 3) for entry in plain.state.log_history if "loss" in entry and entry["step"] > 10]
    print(f"losses as logged: {losses}; weights that hold NaN: {bad_weights(plain)}")
    print(f"all that is left: {sorted(os.listdir(f'{folder}/plain'))}")

    print("--- continued under guard, in fp16")
    try:
        train(make_trainer(run, 20, torch.float16))
    except ckptguard.RollbackExhausted as error:
        print(error)
    print(subprocess.check_output([sys.executable, "-m", "ckptguard", "incident", run], text=True))

    print("--- mended as the report advises: weights in fp32")
    trainer = make_trainer(run, 20, torch.float32)
    train(trainer)
    print(f"finished at step {trainer.state.global_step}, weights that hold NaN: {bad_weights(trainer)}")
    print(f"see: ckptguard list {run}")


if __name__ == "__main__":
    main()
