"""Runs of Lightning: ``write_lightning.py write ROOT KIND...``; ``resume RUN CHECKPOINT...`` continues from each, and
``weights`` loads the weights of each for use.

Kinds: files (ModelCheckpoint's top-k beside ``last.ckpt``, a NaN monitor so that ``best_score`` is inf, batch norm, a
mask buffer), sharded. The FSDP strategy needs an accelerator device: sharded takes Lightning's own checkpoint apart as
that strategy does: ``meta.pt`` with everything but the tensors, and DCP's files beside it.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import lightning
import torch
import torch.distributed.checkpoint as dcp
from evidence import compare, compare_weights, record
from lightning.pytorch.callbacks import ModelCheckpoint

STEPS = (2, 4, 6)


class Module(lightning.LightningModule):
    """A tiny module with everything that is not finite by intent."""

    def __init__(self, monitored: float = float("nan")) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def training_step(self, batch, number):
        loss = self.net(batch[0]).square().mean()
        self.log("quality", torch.tensor(self.hparams.monitored))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Witness(lightning.Callback):
    """Records what is saved; on a resumed run compares what was loaded."""

    def __init__(self, run: Path, step: int | None = None) -> None:
        self.run, self.step, self.different = run, step, None

    def states(self, trainer, module):
        return {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}

    def on_train_batch_end(self, trainer, module, *rest):
        if self.step is None and trainer.global_step in STEPS:
            record(self.run, trainer.global_step, **self.states(trainer, module))

    def on_train_start(self, trainer, module):
        if self.step is not None:
            assert trainer.global_step == self.step, trainer.global_step
            self.different = compare(self.run, self.step, **self.states(trainer, module))


def trainer(folder: Path, witness: Witness, steps: int) -> lightning.Trainer:
    """A quiet Trainer that saves every second step."""
    saver = ModelCheckpoint(folder, monitor="quality", save_top_k=3, save_last=True, every_n_train_steps=STEPS[0])
    return lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[witness, saver],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def data():
    """The same batches for every call."""
    made = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(made), batch_size=2)


def take_apart(run: Path) -> None:
    """Lightning's files as its sharded strategies lay them out: ``X.ckpt/{meta.pt, .metadata, __0_0.distcp}``."""
    for path in sorted((run.parent / "files").glob("epoch*.ckpt")):
        content = torch.load(path, weights_only=True)
        state = {"model": content.pop("state_dict"), "optimizer_0": content.pop("optimizer_states")[0]}
        target = run / path.name
        dcp.save(state, checkpoint_id=target)
        torch.save(content, target / "meta.pt")
        record(run, content["global_step"], state=state)


def main() -> None:
    """Train and save, or resume and compare."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    verb, arguments = sys.argv[1], sys.argv[2:]
    if verb == "write":
        for kind in arguments[1:]:
            run = Path(arguments[0], kind)
            if kind == "sharded":
                take_apart(run)
            else:
                monitored = float("nan") if kind == "files" else 1.0
                trainer(run, Witness(run), STEPS[-1]).fit(Module(monitored), data())
        return
    for run, checkpoint in zip(map(Path, arguments[::2]), map(Path, arguments[1::2]), strict=True):
        if verb == "weights":
            weights(run, checkpoint)
            continue
        if run.name == "sharded":
            step = torch.load(checkpoint / "meta.pt", weights_only=True)["global_step"]
            module = Module()
            optimizer = module.configure_optimizers()["optimizer"]
            template = torch.load(next((run.parent / "files").glob(f"*step={step}.ckpt")), weights_only=True)
            state = {"model": module.state_dict(), "optimizer_0": blank(template["optimizer_states"][0])}
            dcp.load(state, checkpoint_id=checkpoint)
            optimizer.load_state_dict(state["optimizer_0"])
            different = compare(run, step, state=state)
        else:
            step = torch.load(checkpoint, weights_only=True)["global_step"]
            witness = Witness(run, step)
            made = trainer(run.parent / "resumed", witness, step + 1)
            made.fit(Module(), data(), ckpt_path=str(checkpoint))
            different = witness.different
        assert different == [], f"{checkpoint}: {different}"


def weights(run: Path, checkpoint: Path) -> None:
    """Load for use, and see that a resume is refused in Lightning's own words."""
    step = torch.load(checkpoint, weights_only=True)["global_step"]
    module = Module.load_from_checkpoint(checkpoint)
    assert compare_weights(run, step, module.state_dict()) == [], checkpoint
    said = ""
    try:
        trainer(run.parent / "resumed", Witness(run, step), step + 1).fit(Module(), data(), ckpt_path=str(checkpoint))
    except KeyError as error:
        said = str(error)
    assert "contains only the model" in said, said


def blank(value):
    """A nested state with its tensors emptied, for a load in place."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    main()
