"""Runs of Hugging Face's Trainer, as it leaves them: ``write_hf_trainer.py write ROOT KIND...``.

Kinds: single (one weights file), sharded (several with an index), lora (a PEFT adapter), ddp (two gloo ranks),
deepspeed (ZeRO-2 inside).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from evidence import compare, compare_weights, record
from leave import leave

STEPS = (2, 4, 6)
ZERO_2 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


class Sharding(transformers.Trainer):
    """A Trainer whose weights come in shards of a few kilobytes."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir, "model.safetensors").unlink()
        self.model.save_pretrained(output_dir, max_shard_size="8KB")


class Witness(transformers.TrainerCallback):
    """Records the state that was just saved, or, on a resumed run, compares the state that was just loaded."""

    def __init__(self, run: Path, compare_with: int | None = None) -> None:
        self.run, self.compare_with, self.different = run, compare_with, None

    def on_save(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        if self.compare_with is None:
            record(self.run, state.global_step, **states(model, optimizer, lr_scheduler))

    def on_train_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        if self.compare_with is not None:
            assert state.global_step == self.compare_with, state.global_step
            self.different = compare(self.run, self.compare_with, **states(model, optimizer, lr_scheduler))


def states(model, optimizer, scheduler):
    """What a Trainer's checkpoint must give back."""
    return {
        "model": {k.removeprefix("module."): v for k, v in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


def trainer(run: Path, witness: Witness) -> transformers.Trainer:
    """A tiny language model under the installed Trainer, equal for every call. The run's name is its kind."""
    kind = run.name
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=kind == "single",
    )
    model = transformers.Qwen2ForCausalLM(config)
    if kind == "lora":
        import peft

        wanted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens"])
        model = peft.get_peft_model(model, wanted)
    arguments = transformers.TrainingArguments(
        str(run if witness.compare_with is None else run.parent / "resumed" / kind),
        max_steps=STEPS[-1] if witness.compare_with is None else witness.compare_with + 1,
        save_steps=STEPS[0],
        logging_steps=1,
        per_device_train_batch_size=2,
        warmup_steps=2,
        report_to=[],
        use_cpu=kind != "deepspeed",
        disable_tqdm=True,
        ddp_backend="gloo" if kind == "ddp" else None,
        deepspeed=ZERO_2 if kind == "deepspeed" else None,
    )
    examples = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(40)]
    made = Sharding if kind == "sharded" else transformers.Trainer
    return made(model, arguments, train_dataset=examples, callbacks=[witness])


def main() -> None:
    """``write ROOT KIND...``: train and save; ``resume RUN CHECKPOINT...``: resume from each and compare; ``weights``
    with the same: load the model alone."""
    verb, arguments = sys.argv[1], sys.argv[2:]
    if "deepspeed" in sys.argv[2:] or any(Path(a).name == "deepspeed" for a in arguments):
        import deepspeed_on_cpu

        deepspeed_on_cpu.prepare()
        deepspeed_on_cpu.prepare_accelerate()
    if verb == "write":
        for kind in arguments[1:]:
            run = Path(arguments[0], kind)
            trainer(run, Witness(run)).train()
    elif verb == "weights":
        for run, checkpoint in zip(map(Path, arguments[::2]), map(Path, arguments[1::2]), strict=True):
            model = transformers.Qwen2ForCausalLM.from_pretrained(checkpoint)
            different = compare_weights(run, int(checkpoint.name.split("-")[1]), model.state_dict())
            assert different == [], f"{checkpoint}: {different}"
    else:
        for run, checkpoint in zip(map(Path, arguments[::2]), map(Path, arguments[1::2]), strict=True):
            witness = Witness(run, compare_with=int(checkpoint.name.split("-")[1]))
            trainer(run, witness).train(resume_from_checkpoint=str(checkpoint))
            assert witness.different == [], f"{checkpoint}: {witness.different}"
    leave()


if __name__ == "__main__":
    main()
