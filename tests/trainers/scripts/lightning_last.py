"""Lightning: ``epoch=E-step=S.ckpt`` and ``last.ckpt``, by its ModelCheckpoint; a resume is told of the newest ``last``
one, for in a run that was copied elsewhere it writes ``last-v1.ckpt``."""

import logging
import warnings

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from tells import FROM, LAST, RUN, Tells, small_model, torch

tells = Tells(RUN)
last = max(RUN.glob("last*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """The small network."""

    def __init__(self):
        super().__init__()
        self.net = small_model()

    def training_step(self, batch, number):
        data = tells.batch(self.current_epoch + 1, 4, 16)
        return (self.net(data) - data).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Saver(ModelCheckpoint):
    """The real one, which says when it is done."""

    def on_train_start(self, trainer, module):
        super().on_train_start(trainer, module)
        epoch = trainer.current_epoch
        tells.started(epoch, module.state_dict() if epoch else None)

    def on_train_epoch_end(self, trainer, module):
        super().on_train_epoch_end(trainer, module)
        epoch = trainer.current_epoch
        name = f"epoch={epoch}-step={trainer.global_step}.ckpt"
        tells.saved(epoch + 1, module.state_dict(), name, self.last_model_path)


data = torch.utils.data.DataLoader(torch.zeros(2, 16))
trainer = lightning.Trainer(
    max_epochs=LAST,
    accelerator="cpu",
    devices=1,
    logger=False,
    callbacks=[Saver(RUN, save_last=True, save_top_k=-1)],
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=RUN,
)
trainer.fit(Module(), data, ckpt_path=FROM or (last and str(last)))
