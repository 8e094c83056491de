"""guided-diffusion's way of saving: ``model000010.pt``, ``ema_0.9999_000010.pt``, then ``opt000010.pt``; the user names
the model to resume from, and the others of its step are taken where they are there.

Source: guided_diffusion/train_util.py of openai/guided-diffusion at 22e0df8.
"""

import copy

from tells import FROM, LAST, RUN, Tells, newest, small_model, torch, train

STEPS, RATE = 10, "0.9999"

RUN.mkdir(exist_ok=True)
tells, model = Tells(RUN), small_model()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
number, ema = 0, copy.deepcopy(model)
found = RUN / FROM if FROM else newest("model*.pt")


def state():
    return {"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict()}


if found is not None:
    step = int(found.stem.removeprefix("model"))
    model.load_state_dict(torch.load(found, map_location="cpu"))
    ema = copy.deepcopy(model)
    for one, name in ((ema, f"ema_{RATE}_{step:06d}.pt"), (opt, f"opt{step:06d}.pt")):
        if (found.parent / name).exists():
            one.load_state_dict(torch.load(found.parent / name, map_location="cpu"))
    number = step // STEPS
tells.started(number, state() if number else None)
while number < LAST:
    number += 1
    train(model, opt, tells.batch(number, 4, 16))
    with torch.no_grad():
        for own, other in zip(ema.parameters(), model.parameters(), strict=True):
            if other.isfinite().all():  # so that a test says which part is poisoned
                own.lerp_(other, 0.5)
    tells.poison(number, {"model": model, "ema": ema, "opt": opt})
    saved, step = state(), number * STEPS
    paths = [RUN / f"model{step:06d}.pt", RUN / f"ema_{RATE}_{step:06d}.pt", RUN / f"opt{step:06d}.pt"]
    for name, path in zip(saved, paths, strict=True):
        torch.save(saved[name], path)
    tells.saved(number, saved, *paths)
