"""fairseq's way of saving: ``checkpoint_E_U.pt`` every few updates, written beside and renamed, then copied over
``checkpoint_last.pt`` (and ``checkpoint_best.pt``); the oldest go; a resume reads ``checkpoint_last.pt``."""

import os
import shutil

from tells import LAST, RUN, Tells, small_model, torch, train

UPDATES, PER_EPOCH, KEEP = 500, 2, 3

RUN.mkdir(exist_ok=True)
tells, last = Tells(RUN), RUN / "checkpoint_last.pt"
model = small_model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
number, best, history, written = 0, 1e9, [], []
if last.exists():
    state = torch.load(last, map_location="cpu", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["last_optimizer_state"])
    history, best = state["optimizer_history"], state["extra_state"]["best"]
    number = history[-1]["num_updates"] // UPDATES
tells.started(number, model.state_dict() if number else None)
while number < LAST:
    number += 1
    loss = train(model, optimizer, tells.batch(number, 4, 16))
    epoch, updates = 1 + (number - 1) // PER_EPOCH, number * UPDATES
    progress = {"optimizer_name": "FairseqAdam", "lr_scheduler_state": {"best": None}, "num_updates": updates}
    history = [*history, progress]
    better = loss < best
    best = min(loss, best)
    state = {
        "args": None,
        "cfg": {"_name": None, "common": {"seed": 1}},
        "model": model.state_dict(),
        "criterion": {},
        "optimizer_history": history,
        "task_state": {},
        "extra_state": {
            "train_iterator": {"version": 2, "epoch": epoch, "iterations_in_epoch": updates, "shuffle": True},
            "val_loss": loss,
            "best": best,
        },
        "last_optimizer_state": optimizer.state_dict(),
    }
    path = RUN / f"checkpoint_{epoch}_{updates}.pt"
    torch.save(state, f"{path}.tmp")
    os.rename(f"{path}.tmp", path)
    paths = [path, last, *([RUN / "checkpoint_best.pt"] if better else [])]
    for copy in paths[1:]:
        shutil.copyfile(path, copy)
    written.append(path)
    for old in written[:-KEEP]:
        old.unlink(missing_ok=True)
    tells.saved(number, model.state_dict(), *paths)
