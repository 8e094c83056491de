"""pytorch-ignite's ModelCheckpoint: ``checkpoint_10.pt`` with the model, the optimizer and the trainer, of which two
stay, and ``best_model_20_score=0.1234.pt``; the user resumes from the checkpoint with the highest number."""

import packages  # first

# isort: split

from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, ModelCheckpoint
from tells import LAST, RUN, Tells, newest, small_model, torch, train

ITERATIONS = 2

packages.torch.set_num_threads(1)
tells, model = Tells(RUN), small_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
trainer = Engine(lambda engine, batch: train(model, optimizer, tells.batch(engine.state.epoch, 4, 16)))
to_save = {"model": model, "optimizer": optimizer, "trainer": trainer}
saver = ModelCheckpoint(RUN, "", n_saved=2, require_empty=False)
best = ModelCheckpoint(RUN, "best", n_saved=1, require_empty=False, score_name="score",
                       score_function=lambda engine: -engine.state.output)  # fmt: skip


def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@trainer.on(Events.EPOCH_COMPLETED)
def save(engine):
    number = engine.state.epoch
    saver(engine, to_save)
    before = set(RUN.glob("best*"))
    best(engine, {"model": model})
    tells.saved(number, state(), saver.last_checkpoint, *(set(RUN.glob("best*")) - before))


number, found = 0, newest("checkpoint_*.pt")
if found is not None:
    Checkpoint.load_objects(to_load=to_save, checkpoint=torch.load(found, map_location="cpu"))
    number = trainer.state.epoch
tells.started(number, state() if number else None)
if number < LAST:
    trainer.run([0] * ITERATIONS, max_epochs=LAST)
