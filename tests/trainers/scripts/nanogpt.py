"""nanoGPT's way of saving: ``ckpt.pt``, in place, at each evaluation; a resume evaluates, and saves, at once."""

from tells import LAST, RUN, Tells, small_model, torch, train

EVERY = 500  # updates between two evaluations

RUN.mkdir(exist_ok=True)
tells, path = Tells(RUN), RUN / "ckpt.pt"
model = small_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
number, best, resumed = 0, 1e9, path.exists()
if resumed:
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    number, best = checkpoint["iter_num"] // EVERY, checkpoint["best_val_loss"]
tells.started(number, model.state_dict() if resumed else None)
while True:
    if number:
        loss = float(model(torch.ones(1, 16)).detach().square().mean())
        best = min(best, loss + (0.0 if resumed else 0.25))
        content = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "model_args": {"n_layer": 2, "n_embd": 16},
            "iter_num": number * EVERY,
            "best_val_loss": best,
            "config": {"out_dir": RUN.name, "always_save_checkpoint": True},
        }
        torch.save(content, path)
        tells.saved(number, model.state_dict(), path)
    if number >= LAST:
        break
    number += 1
    train(model, optimizer, tells.batch(number, 4, 16))
