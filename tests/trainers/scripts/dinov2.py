"""DINOv2's way of saving: each rank writes ``model_0000099.rank_0.pth`` with its own part, then the name of that file
into ``last_checkpoint.rank_0``; the oldest go; a resume reads what each rank's pointer names.

One process is all ranks here. Source: dinov2/fsdp/__init__.py at e1277af.
"""

from tells import FROM, LAST, RUN, Tells, small_model, torch, train

ITERATIONS, RANKS, KEEP = 100, 2, 3

RUN.mkdir(exist_ok=True)
tells, model = Tells(RUN), small_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
number, written = 0, []


def read(rank):
    """What a rank resumes from."""
    name = (RUN / f"last_checkpoint.rank_{rank}").read_text() if FROM is None else FROM
    return torch.load(RUN / name.replace("rank_0", f"rank_{rank}"), map_location="cpu", weights_only=False)


if FROM is not None or (RUN / "last_checkpoint.rank_0").exists():
    parts = [read(rank) for rank in range(RANKS)]
    iterations = {part["iteration"] for part in parts}
    assert len(iterations) == 1, f"the ranks resume from {iterations}"
    whole = {name: torch.cat([part["model"][name] for part in parts]) for name in parts[0]["model"]}
    model.load_state_dict(whole)
    number = (iterations.pop() + 1) // ITERATIONS
tells.started(number, model.state_dict() if number else None)
while number < LAST:
    number += 1
    train(model, optimizer, tells.batch(number, 4, 16))
    iteration = number * ITERATIONS - 1
    paths = [RUN / f"model_{iteration:07d}.rank_{rank}.pth" for rank in range(RANKS)]
    for rank, path in enumerate(paths):
        own = {name: value.chunk(RANKS)[rank].clone() for name, value in model.state_dict().items()}
        moments = {n: {"exp_avg": optimizer.state[p]["exp_avg"].chunk(RANKS)[rank].clone()} for n, p in
                   model.named_parameters()}  # fmt: skip
        torch.save({"model": own, "optimizer": {"state": moments}, "iteration": iteration}, path)
        (RUN / f"last_checkpoint.rank_{rank}").write_text(path.name)
    written.append(paths)
    for old in (path for paths in written[:-KEEP] for path in paths):
        old.unlink(missing_ok=True)
    tells.saved(number, model.state_dict(), paths[0], more=paths[1:])
