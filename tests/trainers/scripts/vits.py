"""VITS's and so-vits-svc's way of saving: ``G_400.pth``, then ``D_400.pth``, each with its own optimizer; the newest
two of each stay; a resume takes the last of each, and the step from the name of D.

Source: train.py and utils.py of svc-develop-team/so-vits-svc at 730930d.
"""

from tells import LAST, RUN, Tells, newest, small_model, torch, train

STEPS = 100

RUN.mkdir(exist_ok=True)
tells = Tells(RUN)
nets = {"G": small_model(0), "D": small_model(1)}
optimizers = {name: torch.optim.AdamW(net.parameters(), lr=1e-2) for name, net in nets.items()}
number = 0


def state():
    return {name: {"model": net.state_dict(), "optimizer": optimizers[name].state_dict()} for name, net in nets.items()}


if newest("G_*.pth") and newest("D_*.pth"):
    for name, net in nets.items():
        loaded = torch.load(newest(f"{name}_*.pth"), map_location="cpu")
        net.load_state_dict(loaded["model"])
        optimizers[name].load_state_dict(loaded["optimizer"])
    number = int(newest("D_*.pth").stem.removeprefix("D_")) // STEPS
tells.started(number, state() if number else None)
while number < LAST:
    number += 1
    for name, net in nets.items():
        train(net, optimizers[name], tells.batch(number, 4, 16))
    tells.poison(number, nets)
    saved, steps = state(), number * STEPS
    paths = {name: RUN / f"{name}_{steps}.pth" for name in nets}
    for name, path in paths.items():
        torch.save({**saved[name], "iteration": 1 + number // 3, "learning_rate": 1e-2}, path)
    tells.saved(number, saved, *paths.values())
