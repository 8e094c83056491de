"""SpeechBrain's Brain and Checkpointer: a folder ``CKPT+<date>+<n>`` a save, of which two are kept; a resume takes the
newest by ``CKPT.yaml``."""

import packages  # first

# isort: split

import speechbrain
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.epoch_loop import EpochCounter
from tells import LAST, RUN, Tells, small_model, torch

tells = Tells(RUN)
RUN.mkdir(exist_ok=True)


class Brain(speechbrain.Brain):
    """Trains the small network to say what it hears."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return (predictions - batch).square().mean()

    def on_fit_start(self):
        super().on_fit_start()
        number = counter.current
        tells.started(number, net.state_dict() if number else None)

    def on_stage_end(self, stage, stage_loss, epoch):
        if tells.is_poisoned(epoch):
            packages.poison(net)
        made = self.checkpointer.save_and_keep_only(meta={"loss": stage_loss, "epoch": epoch}, num_to_keep=2)
        newest = made or self.checkpointer.find_checkpoint()
        tells.saved(epoch, net.state_dict(), newest.path.name)


net, counter = small_model(), EpochCounter(limit=LAST)
checkpointer = Checkpointer(RUN, recoverables={"net": net, "counter": counter})
brain = Brain({"net": net}, lambda p: torch.optim.Adam(p, lr=1e-2), checkpointer=checkpointer)
brain.fit(counter, [tells.batch(0, 4, 16)] * 2, progressbar=False)
