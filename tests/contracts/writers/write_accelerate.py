"""Runs of accelerate's ``save_state``: ``write_accelerate.py write ROOT KIND...``.

Kinds: named (folders that the loop names), automatic (``checkpoints/checkpoint_K``), ddp (two gloo ranks),
deepspeed (ZeRO-2 inside), fsdp. FSDP needs an accelerator device: that kind's ``pytorch_model_fsdp_0/`` and
``optimizer_0/`` are written by torch.distributed.checkpoint itself, with the planner and keys that accelerate uses,
and the rest of the folder by accelerate.
"""

from __future__ import annotations

import sys
from pathlib import Path

import accelerate
import torch
import torch.distributed.checkpoint as dcp
from evidence import compare, compare_weights, record
from leave import leave

STEPS = (2, 4, 6)


class Counter:
    """A part of the loop's own, saved as ``custom_checkpoint_0.pkl``."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Loop:
    """A small loop under an Accelerator, equal for every call. The run's name is its kind."""

    def __init__(self, run: Path) -> None:
        self.run, self.kind = run, run.name
        torch.manual_seed(0)
        plugin = None
        if self.kind == "deepspeed":
            plugin = accelerate.DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1)
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
            plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
        where = accelerate.utils.ProjectConfiguration(str(run), automatic_checkpoint_naming=self.kind == "automatic")
        self.accelerator = accelerate.Accelerator(
            cpu=self.kind != "deepspeed", project_config=where, deepspeed_plugin=plugin
        )
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
        data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.data, self.scheduler = self.accelerator.prepare(
            model, optimizer, data, scheduler
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def states(self):
        """What a checkpoint must give back."""
        states = {"model": self.accelerator.unwrap_model(self.model).state_dict(), "counter": self.counter.state_dict()}
        if self.kind != "fsdp":
            states["optimizer"] = self.optimizer.state_dict()
        return states

    def train(self) -> None:
        for step, batch in zip(range(1, STEPS[-1] + 1), self.data, strict=False):
            loss = self.model(batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.seen = step
            if step in STEPS:
                self.save(step)

    def save(self, step: int) -> None:
        record(self.run, step, **self.states())
        if self.kind == "automatic":
            self.accelerator.save_state()
            return
        folder = self.run / f"step_{step}" if self.kind == "named" else self.run / f"checkpoint-{step}"
        self.accelerator.save_state(str(folder))
        if self.kind == "fsdp":
            (folder / "model.safetensors").unlink()
            (folder / "optimizer.bin").unlink()
            dcp.save({"model": self.model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")
            dcp.save({"optimizer": self.optimizer.state_dict()}, checkpoint_id=folder / "optimizer_0")

    def load(self, checkpoint: Path) -> None:
        if self.kind != "fsdp":
            self.accelerator.load_state(str(checkpoint))
            return
        state = {"model": self.model.state_dict()}
        dcp.load(state, checkpoint_id=checkpoint / "pytorch_model_fsdp_0")
        self.model.load_state_dict(state["model"])
        self.counter.load_state_dict(torch.load(checkpoint / "custom_checkpoint_0.pkl"))


def main() -> None:
    """``write ROOT KIND...``: train and save; ``resume RUN CHECKPOINT STEP...``: load each and compare; ``weights``
    with the same: load the model alone."""
    verb, arguments = sys.argv[1], sys.argv[2:]
    if any(Path(a).name == "deepspeed" for a in arguments):
        import deepspeed_on_cpu

        deepspeed_on_cpu.prepare()
        deepspeed_on_cpu.prepare_accelerate()
    if verb == "write":
        for kind in arguments[1:]:
            Loop(Path(arguments[0], kind)).train()
    else:
        for run, checkpoint, step in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
            loop = Loop(Path(run))
            if verb == "weights":
                if loop.kind == "fsdp":
                    loop.load(Path(checkpoint))
                else:
                    accelerate.load_checkpoint_in_model(loop.model, checkpoint)
                assert compare_weights(Path(run), int(step), loop.model.state_dict()) == [], checkpoint
                continue
            loop.load(Path(checkpoint))
            different = compare(Path(run), int(step), **loop.states())
            assert different == [], f"{checkpoint}: {different}"
    leave()


if __name__ == "__main__":
    main()
