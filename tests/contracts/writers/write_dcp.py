"""Runs of torch.distributed.checkpoint under FSDP2, two gloo ranks: ``write_dcp.py write ROOT KIND...``.

Kinds: step (``step_N/`` with model and optimizer), titan (torchtitan's ``checkpoint/step-N`` with its flat keys),
hf_shards (the safetensors flavour of HuggingFaceStorageWriter, model alone, a row of files per rank), hf (the same,
consolidated to whole tensors, with the rows in ``sharded/``).
``resume RUN CHECKPOINT STEP...`` loads with however many ranks it is started on, ``weights`` the weights alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from evidence import compare, record
from leave import leave
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = (2, 4, 6)


def build():
    """A tiny sharded model and its optimizer, equal for every call."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def layout(kind: str, model, optimizer, step: int):
    """The state that a kind saves, sharded."""
    weights, moments = get_state_dict(model, optimizer)
    if kind.startswith("hf"):
        return weights
    if kind == "titan":
        return {
            **weights,
            "optimizer": moments,
            "train_state": {"step": torch.tensor(step)},
            "dataloader": {"seen": step},
        }
    return {"model": weights, "optimizer": moments, "step": step}


def whole(value):
    """A nested state with its sharded tensors put together; every rank must call it."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def folder(run: Path, step: int) -> Path:
    """Where a kind puts a step."""
    return run / "checkpoint" / f"step-{step}" if run.name == "titan" else run / f"step_{step}"


def write(run: Path) -> None:
    model, optimizer = build()
    for step in range(1, STEPS[-1] + 1):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step not in STEPS:
            continue
        state = layout(run.name, model, optimizer, step)
        record(run, step, state=whole(state))
        if run.name.startswith("hf"):
            mapping = {key: 1 + number % 2 for number, key in enumerate(sorted(state))}
            writer = HuggingFaceStorageWriter(
                str(folder(run, step)),
                fqn_to_index_mapping=mapping,
                save_distributed=True,
                enable_consolidation=run.name == "hf",
            )
            dcp.save(state, storage_writer=writer)
        else:
            dcp.save(state, checkpoint_id=folder(run, step))


def resume(run: Path, checkpoint: Path, step: int) -> None:
    model, optimizer = build()
    state = layout(run.name, model, optimizer, -1)
    if run.name.startswith("hf"):
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(checkpoint)))
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=get_state_dict(model, optimizer)[1])
    else:
        dcp.load(state, checkpoint_id=checkpoint)
    found = whole(state)
    different = compare(run, step, state=found)
    assert different == [], f"{checkpoint}: {different}"


def weights(run: Path, checkpoint: Path, step: int) -> None:
    """Load the model alone; what an optimizer needs is not there."""
    model, optimizer = build()
    state = layout(run.name, model, optimizer, -1)
    asked = {name: value for name, value in state.items() if name != "optimizer"}
    dcp.load(asked, checkpoint_id=checkpoint)
    different = compare(run, step, state=whole(asked))
    assert different, checkpoint
    assert all(name.startswith("state:/optimizer/") for name in different), different
    refused = False
    try:
        dcp.load(state, checkpoint_id=checkpoint)
    except dcp.api.CheckpointException:
        refused = True
    assert refused, checkpoint


def main() -> None:
    """Train and save, or load and compare."""
    verb, arguments = sys.argv[1], sys.argv[2:]
    torch.distributed.init_process_group("gloo")
    if verb == "write":
        for kind in arguments[1:]:
            write(Path(arguments[0], kind))
    else:
        for run, checkpoint, step in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
            (weights if verb == "weights" else resume)(Path(run), Path(checkpoint), int(step))
    leave()


if __name__ == "__main__":
    main()
