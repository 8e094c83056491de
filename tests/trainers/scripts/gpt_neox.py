"""GPT-NeoX's way of saving, by DeepSpeed's pipeline engine: ``global_stepN`` with a file for each layer, the model
states, the optimizer's states and the configuration, then ``latest``; the oldest go. A resume reads ``latest``,
or the folder of the iteration that is asked for."""

import shutil

from tells import FROM, LAST, RUN, Path, Tells, small_model, torch, train

EVERY, KEEP = 10, 3

RUN.mkdir(exist_ok=True)
tells, latest = Tells(RUN), RUN / "latest"
model = small_model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
number = 0
if FROM or latest.exists():
    folder = Path(FROM) if FROM else RUN / latest.read_text().strip()
    for index, layer in enumerate(model):
        name = f"layer_{index:02d}-model_00-model_states.pt"
        layer.load_state_dict(torch.load(folder / name, weights_only=False))
    states = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    number = states["iteration"] // EVERY
    zero = torch.load(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    optimizer.load_state_dict(zero["optimizer_state_dict"]["base_optimizer_state"])
tells.started(number, model.state_dict() if number else None)
while number < LAST:
    number += 1
    train(model, optimizer, tells.batch(number, 4, 16))
    steps = number * EVERY
    folder = RUN / f"global_step{steps}"
    folder.mkdir(exist_ok=True)
    for index, layer in enumerate(model):
        torch.save(layer.state_dict(), folder / f"layer_{index:02d}-model_00-model_states.pt")
    states = {
        "module": None,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: value.shape for name, value in model.named_parameters()}],
        "lr_scheduler": {"num_iters": steps},
        "skipped_steps": 0,
        "global_steps": steps,
        "global_samples": steps * 4,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "iteration": steps,
        "args": {"num_layers": 3, "hidden_size": 16},
    }
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    zero = {"base_optimizer_state": optimizer.state_dict(), "zero_stage": 1, "partition_count": 1, "overflow": False}
    torch.save({"optimizer_state_dict": zero}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / "small.yml").write_text('{"num-layers": 3, "hidden-size": 16}\n')
    latest.write_text(folder.name)
    for old in sorted(RUN.glob("global_step*"), key=lambda p: int(p.name[11:]))[:-KEEP]:
        shutil.rmtree(old)
    tells.saved(number, model.state_dict(), folder)
