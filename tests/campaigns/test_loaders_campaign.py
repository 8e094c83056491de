"""Mutants of every format against the formats' own loaders: what is GOOD loads, as what was scanned, and is finite.

``CKPTGUARD_CAMPAIGN=full pytest -s -o timeout=0`` runs the long form. Mutants are numbered, and a number is a seed:
``CKPTGUARD_MUTANTS=kind:first:count`` runs some of them.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import tempfile
import time
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from support.loaders import Files, Loaders, forget, judge, place_for, violation, write
from support.mutants import KINDS, mutated

from ckptguard.values.verdict import Outcome

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
COUNT = 40_000 if FULL else 60
ONLY, FIRST, SOME = (*os.environ.get("CKPTGUARD_MUTANTS", "").split(":"), "", "")[:3]


def training() -> dict[str, object]:
    """What a loop saves: weights, an optimizer's state, numbers and words beside them."""
    weight = torch.arange(6.0).reshape(2, 3) + 1
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 0.5), "exp_avg_sq": torch.rand(2, 3)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0], "foreach": None}]
    return {
        "model": OrderedDict({"w": weight, "b": weight[0].to(torch.bfloat16), "t": weight.t(), "n": torch.tensor([3])}),
        "optimizer": {"state": {0: moments}, "param_groups": groups},
        "step": 3,
        "best": 0.25,
    }


def module() -> OrderedDict[str, torch.Tensor]:
    """The state dict of a module, with what `state_dict` sets on it."""
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).half().state_dict()


def oddities() -> dict[str, object]:
    """What else `torch.save` writes and `weights_only` reads."""
    weight = torch.arange(8.0)
    return {
        "model": {
            "p": torch.nn.Parameter(weight[:4].clone()),
            "shared": [weight[1:3], weight[::2]],
            "c": torch.tensor([1 + 2j]),
            "mask": torch.tensor([True]),
            "sparse": torch.eye(2).to_sparse(),
            "empty": torch.empty(0, 2),
        },
        "shape": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "seen": {1, 2},
        "pair": (1.5, True, None, b"ab"),
    }


def torch_bytes(state: object, **how: object) -> bytes:
    target = io.BytesIO()
    torch.save(state, target, **how)
    return target.getvalue()


def numpy_bytes(save, *arrays: object, **named: object) -> bytes:
    target = io.BytesIO()
    save(target, *arrays, **named)
    return target.getvalue()


def dcp_files(state: dict[str, object]) -> Files:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def examples() -> dict[str, list[Files]]:
    """Small checkpoints of every kind, by the real writers."""
    torch.manual_seed(5)
    states = [training(), module(), oddities()]
    flat = {"a.weight": torch.rand(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "n": torch.tensor([1, 2])}
    matrix, words = np.arange(6.0, dtype="f4").reshape(2, 3), {"model": {"w": np.ones(3, "f4")}, "lr": [0.5], "s": 3}
    halves = [{"a.weight": flat["a.weight"]}, {"b": flat["b"], "n": flat["n"]}]
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = '{"metadata": {"total_size": 48}, "weight_map": {"a.weight": "%s", "b": "%s", "n": "%s"}}'
    shards = {n: safetensors.torch.save(half) for n, half in zip(names, halves, strict=True)}
    return {
        "torch_zip": [{"net.pt": torch_bytes(s)} for s in states],
        "torch_legacy": [{"net.pt": torch_bytes(s, _use_new_zipfile_serialization=False)} for s in states],
        "pickle": [{"net.pkl": pickle.dumps(words, protocol)} for protocol in (0, 2, 4)],
        "safetensors": [{"net.safetensors": safetensors.torch.save(flat, {"format": "pt"})}],
        "npy": [{"net.npy": numpy_bytes(np.save, array)} for array in (matrix, matrix.T, np.array([1.5, {}], object))],
        "npz": [{"net.npz": numpy_bytes(save, w=matrix, b=np.ones(2))} for save in (np.savez, np.savez_compressed)],
        "dcp": [dcp_files({"model": flat, "step": 3, "lr": [0.5]})],
        "sharded": [{**shards, "model.safetensors.index.json": (index % (names[0], *names[1:] * 2)).encode()}],
    }


@pytest.fixture(scope="module")
def loaders():
    """A process with the real loaders."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        found = Loaders(Path(folder))
        found.start(examples())
        yield found
        found.close()


def broken_law(loaders: Loaders, kind: str, files: Files) -> tuple[Outcome, str | None]:
    """The verdict on a mutant, and what of the law it breaks."""
    path = place_for(loaders.folder, kind, files)
    write(path, files)
    try:
        judged = judge(path)
        if judged.checked.outcome is not Outcome.GOOD:
            return judged.checked.outcome, None
        return Outcome.GOOD, violation(path, judged, loaders.load(path))
    finally:
        forget(path)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [k for k in KINDS if ONLY in ("", k)])
def test_what_is_good_loads_as_what_was_scanned(loaders, kind, capsys):
    """GOOD: the loader loads it, yields no other tensors than were scanned, and nothing that is not finite."""
    started, good, broken = time.monotonic(), 0, {}
    first, count = int(FIRST or 0), int(SOME or COUNT)
    bases = examples()[kind]
    for number in range(first, first + count):
        rng = random.Random(f"{kind} {number}")
        outcome, why = broken_law(loaders, kind, mutated(kind, rng.choice(bases), rng))
        good += outcome is Outcome.GOOD
        if why is not None:
            broken[number] = why
    with capsys.disabled():
        if FULL:
            seconds = time.monotonic() - started
            print(f"{kind}: {count} mutants, {good} GOOD, {len(broken)} violations, {count / seconds:.0f} a second")
    assert not broken, broken


@pytest.mark.skipif(not FULL, reason="it takes an hour: CKPTGUARD_CAMPAIGN=full")
@pytest.mark.campaign
@pytest.mark.parametrize("kind", [k for k in KINDS if ONLY in ("", k)])
def test_every_bit_that_flips(loaders, kind, capsys):
    """The same of each bit of one small checkpoint."""
    files, good, broken, count = examples()[kind][0], 0, {}, 0
    for name, data in files.items():
        for bit in range(len(data) * 8):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            outcome, why = broken_law(loaders, kind, {**files, name: bytes(flipped)})
            count += 1
            good += outcome is Outcome.GOOD
            if why is not None:
                broken[name, bit] = why
    with capsys.disabled():
        print(f"{kind}: {count} bits, {good} GOOD, {len(broken)} violations")
    assert not broken, broken
