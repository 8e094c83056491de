"""A training in fp16 that overflows on the batches that are told to, under a guard."""

import torch

from support.guards import guarded


class Half(torch.nn.Module):
    """One matrix, multiplied in fp16: rows above some 200 overflow there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(4, 4) / 2)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen += x.mean(0)
        y = x.half() @ self.weight.half()
        return (y * y).float().mean()


def batches(count, hot=()):
    """Calm batches; those in `hot` overflow in fp16 arithmetic."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 4, generator=generator) * (3000.0 if n in hot else 1.0) for n in range(count)]


def run_half(run, data, total, *, tell_norm=True, save_every=3, **options):
    """Train `Half`; returns (model, losses by the order they came, steps taken)."""
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, steps = [], []
    with guarded(run, model, optimizer, **options) as guard:
        for step, x in guard.steps(data, total=total, save_every=save_every):
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            guard.observe(loss=loss, grad_norm=norm if tell_norm else None)
            losses.append(loss.item())
            steps.append(step)
    return model, losses, steps


def taken(run, data, total, tell, *, model=None, optimizer=None, save_every=3, **options):
    """Train without arithmetic, and observe what `tell(step, number of the batch)` says of each update; returns the
    (step, number) of all, in the order they came."""
    found = []
    with guarded(run, model if model is not None else Half(), optimizer, **options) as guard:
        for step, x in guard.steps(data, total=total, save_every=save_every):
            number = next(n for n, b in enumerate(data) if b is x)
            found.append((step, number))
            guard.observe(**tell(step, number))
    return found
