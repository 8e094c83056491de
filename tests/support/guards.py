"""Guards without a daemon over models small enough for any test, weights that follow from a seed, and a full disk."""

import os

import torch

import ckptguard
from support.runs import QUICK


def guard_of(run, model=None, **options):
    """A guard over a small model under SGD."""
    model = model if model is not None else torch.nn.Linear(200, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"daemon": "off", "settings": QUICK} | options
    return ckptguard.TrainingGuard(run, model=model, optimizer=optimizer, **options)


def guarded(run, model, optimizer=None, **options):
    """A guard over a model with the optimizer that it has, if any."""
    return ckptguard.TrainingGuard(run, model=model, optimizer=optimizer, daemon="off", settings=QUICK, **options)


def model_of(seed):
    """A model of some megabytes whose weights follow from the seed."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def holds(model, seed):
    """Whether the model has exactly the weights that follow from the seed."""
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), model_of(seed).parameters(), strict=True))


def fill_disk(monkeypatch, *, after):
    """Writing fails once this many bytes are written."""
    left = [after]
    real = os.write

    def write(descriptor, data):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
