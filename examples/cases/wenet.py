"""WeNet: one silent recording poisons a conformer's batch norm, although the optimizer's step is skipped.

python examples/cases/wenet.py [RUN]

WeNet makes an update only if the gradient norm is finite. That saves the weights, and not the running mean and
variance of batch norm, which the forward pass has changed by then: every later checkpoint holds NaN. Here the log of
a recording of digital silence is -inf. Checkpoints are WeNet's own: a flat `step_N.pt`, and `step_N.yaml` beside it.
"""

import logging
import subprocess
import sys
import tempfile

import torch
from torch import nn

import ckptguard

STEPS = 60
SILENT = 410  # which recording


class ConvolutionModule(nn.Module):
    """The part of a conformer block that has a batch norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.pointwise = nn.Conv1d(size, 2 * size, 1)
        self.depthwise = nn.Conv1d(size, size, 5, padding=2, groups=size)
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.norm(self.depthwise(nn.functional.glu(self.pointwise(x), dim=1))))


def recordings() -> torch.utils.data.TensorDataset:
    """Waves of a few pitches; what is to be recognised is the pitch. One of them is silence."""
    torch.manual_seed(0)
    pitch = torch.randint(0, 5, (640,))
    time = torch.arange(800) / 100
    waves = torch.sin(2 * torch.pi * (pitch[:, None] + 1) * 3 * time) + 0.1 * torch.randn(640, 800)
    waves[SILENT] = 0
    return torch.utils.data.TensorDataset(waves, pitch)


def features(waves: torch.Tensor) -> torch.Tensor:
    """The log of the spectrum, as every speech recipe takes it; the log of nothing is -inf."""
    return torch.stft(waves, 64, window=torch.hann_window(64), return_complex=True).abs().log()


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="wenet-")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    loader = torch.utils.data.DataLoader(recordings(), batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Conv1d(33, 24, 1), ConvolutionModule(24), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(24, 5)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def save(path: str, step: int) -> None:
        torch.save(model.state_dict(), path)
        with open(path.replace(".pt", ".yaml"), "w") as file:
            file.write(f"epoch: 0\nstep: {step}\ntag: step_{step}\n")

    def load(path: str) -> None:
        model.load_state_dict(torch.load(path, weights_only=True))
        optimizer.state.clear()  # WeNet saves no optimizer state

    with ckptguard.TrainingGuard(
        run, model=model, optimizer=optimizer, save=save, load=load, name="step_{step}.pt"
    ) as guard:
        for step, (waves, pitch) in guard.steps(loader, total=STEPS, save_every=10):
            loss = nn.functional.cross_entropy(model(features(waves)), pitch)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            if torch.isfinite(norm):  # WeNet's own protection
                optimizer.step()
            else:
                mean = model[1].norm.running_mean[0]
                print(f"step {step}: gradient norm {norm:g}, no update made; batch norm's mean: {mean:g}")
            guard.observe(loss=loss, grad_norm=norm)

    model.eval()
    waves, pitch = recordings()[:320]
    right = (model(features(waves)).argmax(1) == pitch).float().mean()
    print(subprocess.check_output([sys.executable, "-m", "ckptguard", "incident", run], text=True))
    print(f"finished at step {guard.step}: {right:.0%} of 320 recordings are recognised; see: ckptguard list {run}")


if __name__ == "__main__":
    main()
