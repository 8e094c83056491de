"""BasicSR's and Real-ESRGAN's way of saving: ``models/net_g_700.pth`` and ``models/net_d_700.pth``, then
``training_states/700.state`` with both optimizers; a resume takes the last state and asks for the networks of its
iteration.

Source: basicsr/train.py, basicsr/models/base_model.py and basicsr/utils/misc.py of XPixelGroup/BasicSR at 8d56e3a.
"""

from tells import LAST, RUN, Tells, newest, small_model, torch, train

ITERATIONS = 100

tells = Tells(RUN)
for folder in ("models", "training_states"):
    (RUN / folder).mkdir(parents=True, exist_ok=True)
nets = {"net_g": small_model(0), "net_d": small_model(1)}
optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in nets.values()]
number, found = 0, newest("training_states/*.state")


def state():
    named = {name: {"params": net.state_dict()} for name, net in nets.items()}
    return {**named, "state": {"optimizers": [one.state_dict() for one in optimizers]}}


if found is not None:
    loaded = torch.load(found, map_location="cpu")
    for one, own in zip(optimizers, loaded["optimizers"], strict=True):
        one.load_state_dict(own)
    for name, net in nets.items():
        net.load_state_dict(torch.load(RUN / f"models/{name}_{loaded['iter']}.pth", map_location="cpu")["params"])
    number = loaded["iter"] // ITERATIONS
tells.started(number, state() if number else None)
while number < LAST:
    number += 1
    for net, one in zip(nets.values(), optimizers, strict=True):
        train(net, one, tells.batch(number, 4, 16))
    tells.poison(number, {**nets, "state": optimizers[0]})
    saved, iteration = state(), number * ITERATIONS
    paths = [RUN / f"models/{name}_{iteration}.pth" for name in nets]
    for name, path in zip(nets, paths, strict=True):
        torch.save(saved[name], path)
    paths.append(RUN / f"training_states/{iteration}.state")
    torch.save({"epoch": number, "iter": iteration, "schedulers": [], **saved["state"]}, paths[-1])
    tells.saved(number, saved, *paths)
