"""Composer's way of saving sharded states: ``ep1-ba10-rank0.pt`` for each rank and a link ``latest-rank0.pt`` to it; a
resume reads what each rank's link names, or what the user names.

One process is all ranks here. Source: composer/callbacks/checkpoint_saver.py and composer/trainer/trainer.py of
mosaicml 0.32.1.
"""

import os

from tells import FROM, LAST, RUN, Tells, small_model, torch, train

BATCHES, RANKS = 10, 2

RUN.mkdir(exist_ok=True)
tells, model = Tells(RUN), small_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
number, links = 0, [RUN / f"latest-rank{rank}.pt" for rank in range(RANKS)]


def part(rank):
    """What a rank saves."""
    own = {name: value.chunk(RANKS)[rank].clone() for name, value in model.state_dict().items()}
    moments = {n: {"exp_avg": optimizer.state[p]["exp_avg"].chunk(RANKS)[rank].clone()} for n, p in
               model.named_parameters() if p in optimizer.state}  # fmt: skip
    return {"model": own, "optimizers": {"AdamW": {"state": moments}}}


loaded = []
if FROM or links[0].exists():
    read = [RUN / FROM.replace("rank0", f"rank{rank}") for rank in range(RANKS)] if FROM else links
    loaded = [torch.load(path, map_location="cpu")["state"] for path in read]
    whole = {name: torch.cat([one["model"][name] for one in loaded]) for name in loaded[0]["model"]}
    model.load_state_dict(whole)
    batches = {one["timestamp"]["Timestamp"]["batch"] for one in loaded}
    assert len(batches) == 1, f"the ranks resume from {batches}"
    number = batches.pop() // BATCHES
parts = {f"rank{r}": {name: one[name] for name in ("model", "optimizers")} for r, one in enumerate(loaded)}
tells.started(number, parts or None)
while number < LAST:
    number += 1
    train(model, optimizer, tells.batch(number, 4, 16))
    parts = {f"rank{rank}": part(rank) for rank in range(RANKS)}
    tells.poison(number, {name: [*own["model"].values()] for name, own in parts.items()})
    paths = [RUN / f"ep{number}-ba{number * BATCHES}-{name}.pt" for name in parts]
    for path, link, own in zip(paths, links, parts.values(), strict=True):
        time = {"Timestamp": {"epoch": number, "batch": number * BATCHES}}
        torch.save({"state": {**own, "timestamp": time}, "rng": []}, path)
        link.unlink(missing_ok=True)
        os.symlink(path.name, link)
    tells.saved(number, parts, paths[0], more=paths[1:])
