"""HiFi-GAN's and BigVGAN's way of saving: ``g_00000300`` holds the generator, ``do_00000300`` the discriminators, both
optimizers and the step, each a file of torch's without a suffix; a resume takes the last name of each prefix.

Source: train.py and utils.py of jik876/hifi-gan at 4769534.
"""

from tells import LAST, RUN, Tells, newest, small_model, torch, train

STEPS = 100

RUN.mkdir(exist_ok=True)
tells = Tells(RUN)
generator, discriminators = small_model(0), {"mpd": small_model(1), "msd": small_model(2)}
optim_g = torch.optim.AdamW(generator.parameters(), lr=1e-2)
optim_d = torch.optim.AdamW([p for one in discriminators.values() for p in one.parameters()], lr=1e-2)
number = 0
cp_g, cp_do = newest("g_????????"), newest("do_????????")


def state():
    return {
        "g": {"generator": generator.state_dict()},
        "do": {
            **{name: one.state_dict() for name, one in discriminators.items()},
            "optim_g": optim_g.state_dict(),
            "optim_d": optim_d.state_dict(),
        },
    }


if cp_g is not None and cp_do is not None:
    loaded = torch.load(cp_do, map_location="cpu")
    generator.load_state_dict(torch.load(cp_g, map_location="cpu")["generator"])
    for name, one in discriminators.items():
        one.load_state_dict(loaded[name])
    optim_g.load_state_dict(loaded["optim_g"])
    optim_d.load_state_dict(loaded["optim_d"])
    number = loaded["steps"] // STEPS
tells.started(number, state() if number else None)
while number < LAST:
    number += 1
    train(generator, optim_g, tells.batch(number, 4, 16))
    for one in discriminators.values():
        train(one, optim_d, tells.batch(number, 4, 16))
    tells.poison(number, {"g": generator, "do": discriminators["mpd"]})
    saved, steps = state(), number * STEPS
    paths = RUN / f"g_{steps:08d}", RUN / f"do_{steps:08d}"
    torch.save(saved["g"], paths[0])
    torch.save({**saved["do"], "steps": steps, "epoch": number}, paths[1])
    tells.saved(number, saved, *paths)
