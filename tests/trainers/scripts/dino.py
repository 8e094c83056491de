"""DINO's way of saving: ``checkpoint.pth`` in place after each epoch, and ``checkpoint0002.pth`` every second one."""

import copy

from tells import LAST, RUN, Tells, small_model, torch, train

EVERY = 2

RUN.mkdir(exist_ok=True)
tells, path = Tells(RUN), RUN / "checkpoint.pth"
student = small_model()
teacher = copy.deepcopy(student)
centre = torch.nn.Linear(16, 1)  # the loss has a state of its own
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
epoch = 0
if path.exists():
    content = torch.load(path, map_location="cpu", weights_only=False)
    student.load_state_dict(content["student"])
    teacher.load_state_dict(content["teacher"])
    optimizer.load_state_dict(content["optimizer"])
    centre.load_state_dict(content["dino_loss"])
    epoch = content["epoch"]
tells.started(epoch, student.state_dict() if epoch else None)
while epoch < LAST:
    train(student, optimizer, tells.batch(epoch + 1, 4, 16))
    with torch.no_grad():
        for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            ours.mul_(0.9).add_(0.1 * theirs)
    content = {
        "student": student.state_dict(),
        "teacher": teacher.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": epoch + 1,
        "args": {"arch": "vit_small", "saveckp_freq": EVERY},
        "dino_loss": centre.state_dict(),
    }
    torch.save(content, path)
    paths = [path]
    if epoch and epoch % EVERY == 0:
        paths.append(RUN / f"checkpoint{epoch:04}.pth")
        torch.save(content, paths[-1])
    epoch += 1
    tells.saved(epoch, student.state_dict(), *paths)
