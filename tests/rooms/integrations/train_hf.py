"""``train_hf.py KINDS FOLDER``: trainings under ``train`` that are struck once, each against one that is not.

Kinds: sharded (weights in several files), lora (PEFT), sft (trl's SFTTrainer); with gloo ranks ddp, fsdp (FSDP2 with
sharded checkpoints), full (FSDP2 with whole ones), zero2 and zero3 (DeepSpeed).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import transformers
from leave import leave
from support.tiny_trainer import Overflow, everything, same, tokenizer

from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.integrations.transformers import train
from ckptguard.values.settings import Settings

QUICK = Settings(settle=0.0)
FSDP = {"fsdp_version": 2, "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}
ZERO_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}
OF_KIND = {
    "ddp": {"ddp_backend": "gloo"},
    "fsdp": {"fsdp": True, "fsdp_config": {**FSDP, "state_dict_type": "SHARDED_STATE_DICT"}},
    "full": {"fsdp": True, "fsdp_config": {**FSDP, "state_dict_type": "FULL_STATE_DICT"}},
    "zero2": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 2}}},
    "zero3": {"deepspeed": {**ZERO, "zero_optimization": ZERO_3}},
}
SHARDING = ("fsdp", "full", "zero2", "zero3")


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
        "use_cpu": kind not in SHARDING,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
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
    made = Sharding if kind == "sharded" else transformers.Trainer
    arguments = transformers.TrainingArguments(str(folder), **(usual | OF_KIND.get(kind, {})))
    return made(model, arguments, train_dataset=data, callbacks=list(callbacks))


class Strike(Overflow):
    """The fault, in a weight that is trained, on one rank only where there are several."""

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if args.process_index != args.world_size - 1:
            return
        trained = [p for p in model.parameters() if p.requires_grad and p.numel()] or partitions(optimizer)
        holder = SimpleNamespace(parameters=lambda: iter(trained))
        super().on_step_end(args, state, control, model=holder, **kwargs)


def partitions(optimizer) -> list:
    """The fp32 masters that this rank holds under ZeRO."""
    zero = getattr(optimizer, "optimizer", optimizer)
    return getattr(zero, "fp32_partitioned_groups_flat", getattr(zero, "single_partition_of_fp32_groups", []))


def local(value):
    """What of it lies on this rank."""
    if isinstance(value, dict):
        return {key: local(one) for key, one in value.items()}
    return [local(one) for one in value] if isinstance(value, list) else getattr(value, "_local_tensor", value)


def all_of(kind: str, trainer):
    """All that training has made, as far as it lies on this rank."""
    if not kind.startswith("zero"):
        return local(everything(trainer))
    masters = partitions(trainer.optimizer)
    moments = [trainer.optimizer.optimizer.optimizer.state[master] for master in masters]
    log = [{k: v for k, v in e.items() if k in ("step", "loss", "learning_rate")} for e in trainer.state.log_history]
    return {"masters": [m.detach() for m in masters], "moments": moments, "log": log}


@contextlib.contextmanager
def gloo_ranks(kind: str):
    """Tell accelerate of the ranks: without a device it takes each for the only one, or knows of DDP alone."""
    if kind not in SHARDING:
        yield
        return
    import deepspeed_on_cpu
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    zero = kind.startswith("zero")
    if zero:
        deepspeed_on_cpu.prepare()
    told = ("gloo", DistributedType.DEEPSPEED if zero else DistributedType.MULTI_GPU)
    with (
        mock.patch.object(PartialState, "_prepare_backend", return_value=told),
        mock.patch.object(PartialState, "set_device", lambda state: setattr(state, "device", torch.device("cpu"))),
        mock.patch.dict(os.environ, {"ACCELERATE_USE_DEEPSPEED": str(zero).lower()}),
    ):
        yield


def main() -> None:
    """Train each kind twice and compare."""
    logging.basicConfig(level=logging.WARNING)
    kinds, root = sys.argv[1].split(","), Path(sys.argv[2])
    for kind in kinds:
        with gloo_ranks(kind):
            struck = make(kind, root / kind / "struck", Strike(5))
            done = train(struck, policy=RollbackPolicy(skip=False), daemon="off", settings=QUICK)
            assert done.global_step == 8, done
            assert struck.args.world_size == int(os.environ.get("WORLD_SIZE", "1"))
            untouched = make(kind, root / kind / "untouched")
            untouched.train()
            ours, theirs = all_of(kind, struck), all_of(kind, untouched)
            different = [part for part in ours if not same(ours[part], theirs[part])]
            assert different == [], f"{kind}: {different}"
            assert all(torch.isfinite(p).all() for p in local(list(struck.model.parameters())))
    leave()


if __name__ == "__main__":
    main()
