"""detectron2's way of saving: ``model_0000099.pth``, then its name in ``last_checkpoint``; ``model_final.pth`` at the
end; the oldest go. A resume reads what ``last_checkpoint`` names."""

from tells import FROM, LAST, RUN, Path, Tells, small_model, torch, train

PERIOD, KEEP = 100, 3

RUN.mkdir(exist_ok=True)
tells, pointer = Tells(RUN), RUN / "last_checkpoint"
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
number, written = 0, []
if FROM or pointer.exists():
    content = torch.load(Path(FROM) if FROM else RUN / pointer.read_text().strip(), weights_only=False)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    scheduler.load_state_dict(content["scheduler"])
    number = (content["iteration"] + 1) // PERIOD
tells.started(number, model.state_dict() if number else None)


def save(name: str, iteration: int) -> None:
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "iteration": iteration,
    }
    with (RUN / name).open("wb") as file:
        torch.save(content, file)
    pointer.write_text(name)


while number < LAST:
    number += 1
    train(model, optimizer, tells.batch(number, 4, 16))
    scheduler.step()
    iteration = number * PERIOD - 1
    name = f"model_{iteration:07d}.pth"
    save(name, iteration)
    written.append(name)
    for old in written[:-KEEP]:
        (RUN / old).unlink(missing_ok=True)
    tells.saved(number, model.state_dict(), name)
if not tells.is_poisoned(number):
    save("model_final.pth", number * PERIOD - 1)
    tells.saved(number, model.state_dict(), "model_final.pth")
