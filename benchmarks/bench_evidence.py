"""What a report costs training: remembering an update, and looking at what is not finite. Ratios of one run.

    python -m benchmarks.bench_evidence [--layers 64]

A layer has 4 MiB.
"""

import time

import torch

from benchmarks.measuring import options
from ckptguard.decisions.health import Signal
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.signals.incident_evidence import SampleBuffer, sick_tensors
from ckptguard.training.signals.weights import first_of, model_tensors


def seconds(work, times):
    """The best of some rounds, for one call."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            work()
        best = min(best, (time.perf_counter() - began) / times)
    return best


def main():
    """Print both figures."""
    layers = options(__doc__, layers=64).layers
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = TrainingParts(model=model, optimizer=optimizer)
    recent, signal = SampleBuffer(parts.optimizer), Signal(step=1, loss=1.0, grad_norm=1.0)
    remember = seconds(lambda: recent.append(signal), 100_000)
    print(f"remembering an update: {remember * 1e6:.2f} us, {remember / 0.010:.4%} of a 10 ms step")
    look = seconds(lambda: first_of(model_tensors(model)), 3)
    gather = seconds(lambda: sick_tensors(model, optimizer, seconds=60), 3)
    print(f"looking at healthy tensors for a report: {gather / look:.2f} x one look")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    gather = seconds(lambda: sick_tensors(model, optimizer), 1)
    print(f"counting in tensors that are all NaN, with the time limit of 0.1 s: {gather:.3f} s, {gather / look:.2f} x")


if __name__ == "__main__":
    main()
