"""A plain training loop with ckptguard. One batch overflows in fp16; training goes back, leaves it out, and goes on.

python examples/plain_loop.py [RUN]
"""

import logging
import sys
import tempfile

import torch

import ckptguard


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="plain-run-")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.manual_seed(0)
    inputs = torch.randn(3200, 16)
    targets = inputs.sum(1, keepdim=True)
    inputs[100] *= 5_000  # what goes wrong in this example: this row overflows in fp16 arithmetic
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with ckptguard.TrainingGuard(run, model=model, optimizer=optimizer) as guard:
        for step, (x, y) in guard.steps(loader, total=200, save_every=20):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.nn.functional.mse_loss(model(x).square().sqrt(), y.abs())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            guard.observe(loss=loss, grad_norm=norm)
            if step % 40 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
    print(f"finished; see: ckptguard list {run}")


if __name__ == "__main__":
    main()
