"""What the documents' Python takes as given: a model, its optimizer, data and a step of training, all tiny."""

from types import SimpleNamespace

import torch


class Tiny(torch.nn.Module):
    """A model that answers with a loss, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch):
        """The loss of a batch."""
        return SimpleNamespace(loss=self.layer(batch).square().mean())


def names(page):
    """The names for a page."""
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

    def train_step(batch):
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "small_batch": torch.randn(2, 4),
        "scheduler": scheduler,
        "scaler": torch.amp.GradScaler("cpu"),
        "train_step": train_step,
    }
    return found | _TAKEN.get(page, dict)()


def for_the_trainer():
    """What the page on the Trainer takes as given."""
    from support.tiny_trainer import Regression, examples

    return {"model": Regression(), "data": examples()}


def for_accelerate():
    """What the page on Accelerate takes as given."""
    import accelerate

    return {"accelerator": accelerate.Accelerator(cpu=True)}


_TAKEN = {"docs/start/trainer.md": for_the_trainer, "docs/start/accelerate.md": for_accelerate}
