"""``train_hf.py KIND FOLDER...``: a training under ``train`` that is struck once, against one that is not.

Kinds: sharded (weights in several files), lora (PEFT), sft (trl's SFTTrainer), ddp (gloo ranks), deepspeed (ZeRO-2).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
import transformers
from leave import leave
from tiny_trainer import Overflow, everything, same

from ckptguard.config import Settings
from ckptguard.integrations.transformers import train
from ckptguard.training.policy import RollbackPolicy

QUICK = Settings(settle=0.0)
ZERO_2 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


class Sharding(transformers.Trainer):
    """A Trainer whose weights come in shards of a few kilobytes."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir, "model.safetensors").unlink()
        self.model.save_pretrained(output_dir, max_shard_size="8KB")


def make(kind: str, folder: Path, *callbacks) -> transformers.Trainer:
    """A tiny language model under the installed Trainer, equal for every call."""
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=0.1,
            tie_word_embeddings=False,
        )
    )
    usual = {
        "max_steps": 8,
        "save_steps": 2,
        "save_total_limit": 1,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "warmup_steps": 2,
        "report_to": [],
        "use_cpu": kind != "deepspeed",
        "disable_tqdm": True,
    }
    data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(40)]
    if kind == "sft":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        rows = Dataset.from_list([{"input_ids": [*range(i, i + 8)]} for i in range(40)])
        arguments = SFTConfig(str(folder), bf16=False, **usual)
        return SFTTrainer(model, arguments, train_dataset=rows, callbacks=list(callbacks), processing_class=tokenizer())
    if kind == "lora":
        import peft

        wanted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens"])
        model = peft.get_peft_model(model, wanted)
    more = {"ddp": {"ddp_backend": "gloo"}, "deepspeed": {"deepspeed": ZERO_2}}.get(kind, {})
    made = Sharding if kind == "sharded" else transformers.Trainer
    arguments = transformers.TrainingArguments(str(folder), **(usual | more))
    return made(model, arguments, train_dataset=data, callbacks=list(callbacks))


def tokenizer():
    """One word for each number."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, **{str(i): i for i in range(1, 64)}}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")


class Strike(Overflow):
    """The fault, in a weight that is trained, on one rank only where there are several."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if args.process_index == args.world_size - 1:
            trained = torch.nn.ParameterList(p for p in model.parameters() if p.requires_grad)
            super().on_step_end(args, state, control, model=trained, **kwargs)


def main() -> None:
    """Train each kind twice and compare."""
    logging.basicConfig(level=logging.WARNING)
    kinds, root = sys.argv[1].split(","), Path(sys.argv[2])
    if "deepspeed" in kinds:
        import deepspeed_on_cpu

        deepspeed_on_cpu.prepare()
        deepspeed_on_cpu.prepare_accelerate()
    for kind in kinds:
        struck = make(kind, root / kind / "struck", Strike(5))
        done = train(struck, policy=RollbackPolicy(skip=False), daemon="off", settings=QUICK)
        assert done.global_step == 8, done
        assert all(torch.isfinite(p).all() for p in struck.model.parameters())
        untouched = make(kind, root / kind / "untouched")
        untouched.train()
        ours, theirs = everything(struck), everything(untouched)
        different = [part for part in ours if not same(ours[part], theirs[part])]
        assert different == [], f"{kind}: {different}"
    leave()


if __name__ == "__main__":
    main()
