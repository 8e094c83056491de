"""CycleGAN's way of saving: the weights of each network alone, as ``latest_net_G.pth``, which ``--continue_train``
reads, and at each second save as ``3_net_G.pth``, too. The user says where it goes on.

Source: train.py and models/base_model.py of junyanz/pytorch-CycleGAN-and-pix2pix.
"""

from tells import LAST, RUN, Tells, small_model, torch, train

RUN.mkdir(exist_ok=True)
tells = Tells(RUN)
nets = {"G": small_model(0), "D": small_model(1)}
optimizers = {name: torch.optim.Adam(net.parameters(), lr=1e-2) for name, net in nets.items()}
number = 0


def state():
    return {name: net.state_dict() for name, net in nets.items()}


if (RUN / "latest_net_G.pth").exists():
    for name, net in nets.items():
        net.load_state_dict(torch.load(RUN / f"latest_net_{name}.pth", map_location="cpu"))
    number = tells.number_of(state())
tells.started(number, state() if number else None)
while number < LAST:
    number += 1
    for name, net in nets.items():
        train(net, optimizers[name], tells.batch(number, 4, 16))
    tells.poison(number, nets)
    saved = state()
    words = ("latest", number) if number % 2 else ("latest",)
    paths = [RUN / f"{word}_net_{name}.pth" for word in words for name in nets]
    for path in paths:
        torch.save(saved[path.stem[-1]], path)
    tells.saved(number, saved, *paths)
