"""torchtune's way of saving a full finetune: each epoch a folder ``epoch_0`` with the weights and what a user needs of
the model, and ``recipe_state/recipe_state.pt`` with the optimizer, which each epoch saves over; a resume reads the last
epoch's weights and the recipe state.

Source: torchtune/training/checkpointing/_checkpointer.py and recipes/full_finetune_single_device.py of 0.6.1.
"""

import json

from tells import FROM, LAST, RUN, Tells, small_model, torch, train

RUN.mkdir(exist_ok=True)
tells, model = Tells(RUN), small_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
recipe = RUN / "recipe_state" / "recipe_state.pt"
number, epochs = 0, [path for path in RUN.glob("epoch_*") if path.name.removeprefix("epoch_").isdigit()]


def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


if FROM or epochs:
    found = RUN / FROM if FROM else max(epochs, key=lambda path: int(path.name.removeprefix("epoch_")))
    model.load_state_dict(torch.load(found / "model-00001-of-00001.bin", map_location="cpu"))
    read = torch.load(recipe, map_location="cpu")
    optimizer.load_state_dict(read["optimizer"])
    number = read["epochs_run"]
tells.started(number, state() if number else None)
while number < LAST:
    train(model, optimizer, tells.batch(number + 1, 4, 16))
    tells.poison(number + 1, {"model": model, "optimizer": optimizer})
    folder = RUN / f"epoch_{number}"
    folder.mkdir(exist_ok=True)
    torch.save(model.state_dict(), folder / "model-00001-of-00001.bin")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 32}))
    number += 1
    recipe.parent.mkdir(exist_ok=True)
    torch.save({"optimizer": optimizer.state_dict(), "epochs_run": number, "seed": 0, "total_epochs": LAST}, recipe)
    tells.saved(number, state(), folder, recipe.parent)
