"""MONAI's CheckpointSaver and CheckpointLoader: ``checkpoint_epoch=3.pt`` with the network and the optimizer, of which
two stay; the user resumes from the one with the highest number."""

import packages  # first

# isort: split

from ignite.engine import Events
from monai.engines import SupervisedTrainer
from monai.handlers import CheckpointLoader, CheckpointSaver
from tells import LAST, RUN, Tells, newest, small_model, torch

packages.torch.set_num_threads(1)
tells, net = Tells(RUN), small_model()
RUN.mkdir(exist_ok=True)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)


def state():
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}


class Saver(CheckpointSaver):
    """The real one, which says when it is done."""

    def interval_completed(self, engine):
        number = engine.state.epoch
        tells.poison(number, {"net": net, "optimizer": optimizer})
        super().interval_completed(engine)
        tells.saved(number, state(), f"checkpoint_epoch={number}.pt")


number, found = 0, newest("checkpoint_epoch=*.pt")
objects = {"net": net, "optimizer": optimizer}
data = [{"image": tells.batch(n, 4, 16), "label": tells.batch(n, 4, 16)} for n in range(2)]
handlers = [Saver(str(RUN), objects, save_interval=1, n_saved=2)]
if found is not None:
    number = int(found.stem.partition("=")[2])
    handlers.append(CheckpointLoader(str(found), objects))
trainer = SupervisedTrainer(
    torch.device("cpu"), LAST, data, net, optimizer, torch.nn.MSELoss(), train_handlers=handlers
)


def begin(engine):
    engine.state.epoch = number
    tells.started(number, state() if number else None)


trainer.add_event_handler(Events.STARTED, begin)
if number < LAST:
    trainer.run()
