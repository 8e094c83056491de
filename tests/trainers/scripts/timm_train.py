"""timm's own saver and resume in the loop of its ``train.py``: ``recovery-E-B.pth.tar``, ``last.pth.tar``, and hard
links to that, ``checkpoint-E.pth.tar`` and ``model_best.pth.tar``; ``--resume RUN/last.pth.tar``."""

import packages  # noqa: F401 - first

# isort: split

from tells import LAST, RUN, Tells, small_model, torch, train
from timm.models import resume_checkpoint
from timm.utils import CheckpointSaver

RUN.mkdir(exist_ok=True)
tells, last = Tells(RUN), RUN / "last.pth.tar"
model = small_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
saver = CheckpointSaver(
    model, optimizer, checkpoint_dir=str(RUN), recovery_dir=str(RUN), decreasing=True, max_history=3
)
epoch = resume_checkpoint(model, str(last), optimizer) if last.exists() else 0
if epoch:
    saver.load_state_dict_from_checkpoint(str(last))
tells.started(epoch, model.state_dict() if epoch else None)
while epoch < LAST:
    train(model, optimizer, tells.batch(epoch + 1, 4, 16))
    saver.save_recovery(epoch, batch_idx=50)
    tells.saved(epoch, model.state_dict(), f"recovery-{epoch}-50.pth.tar")
    loss = train(model, optimizer, tells.batch(epoch + 1, 4, 16))
    _, best = saver.save_checkpoint(epoch, metric=loss)
    names = ["last.pth.tar", f"checkpoint-{epoch}.pth.tar", *(["model_best.pth.tar"] if best == epoch else [])]
    epoch += 1
    tells.saved(epoch, model.state_dict(), *(name for name in names if (RUN / name).exists()))
