"""MMEngine's way of saving: ``epoch_N.pth`` by one write of all bytes, ``last_checkpoint`` with its whole path, and
``best_loss_epoch_N.pth``, of which one is kept; the oldest go. A resume reads what ``last_checkpoint`` names."""

import io

from tells import FROM, LAST, RUN, Path, Tells, small_model, torch, train

KEEP = 2

RUN.mkdir(exist_ok=True)
tells, pointer = Tells(RUN), RUN / "last_checkpoint"
model = small_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
epoch, best, best_path, written = 0, 1e9, None, []
if FROM or pointer.exists():
    content = torch.load(Path(FROM or pointer.read_text().strip()), weights_only=False)
    model.load_state_dict(content["state_dict"])
    optimizer.load_state_dict(content["optimizer"])
    epoch = content["meta"]["epoch"]
    best = content["message_hub"]["best_loss"]
tells.started(epoch, model.state_dict() if epoch else None)
while epoch < LAST:
    epoch += 1
    loss = train(model, optimizer, tells.batch(epoch, 4, 16))
    better = loss < best
    best = min(best, loss)
    content = {
        "meta": {"epoch": epoch, "iter": epoch * 50, "seed": 0, "experiment_name": "run"},
        "state_dict": model.state_dict(),
        "message_hub": {"best_loss": best},
        "optimizer": optimizer.state_dict(),
        "param_schedulers": [{"last_step": epoch}],
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path = RUN / f"epoch_{epoch}.pth"
    path.write_bytes(buffer.getvalue())
    written.append(path)
    for old in written[:-KEEP]:
        old.unlink(missing_ok=True)
    pointer.write_text(str(path))
    paths = [path]
    if better:
        if best_path is not None:
            best_path.unlink(missing_ok=True)
        best_path = RUN / f"best_loss_epoch_{epoch}.pth"
        best_path.write_bytes(buffer.getvalue())
        paths.append(best_path)
    tells.saved(epoch, model.state_dict(), *paths)
