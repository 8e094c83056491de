"""Mutants of every format against the formats' own loaders: what is GOOD loads, as what was scanned, and is finite.

``CKPTGUARD_CAMPAIGN=full pytest -s -o timeout=0`` runs the long form. Mutants are numbered, and a number is a seed:
``CKPTGUARD_MUTANTS=kind:first:count`` runs some of them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from support.mutants import KINDS, Files, mutated
from support.runs import QUICK
from support.tiny_run import inline

from ckptguard.formats.dtypes import DTYPES
from ckptguard.layouts import Checkpoint, folder_as_checkpoint
from ckptguard.layouts.single_file import LAYOUT
from ckptguard.runs.results import Checked
from ckptguard.runs.target import Target
from ckptguard.runs.work import Work
from ckptguard.scan.result import Scan, ScannedFile
from ckptguard.storage import open_storage
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import StrayJudge

TESTS = Path(__file__).resolve().parent.parent
# What `weights_only` does not know at all is no fault of the file, if the other loader takes it.
_NOT_FOR_WEIGHTS = re.compile(
    r"Unsupported (?:global|operand|class)|was not an allowed global by default|Unsupported pickle"
)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": "0"}

PACKED = "of compressed bytes"
LOADER_OF = {"torch_zip": "torch", "torch_legacy": "torch", "npy": "numpy", "npz": "numpy"}


class Judged(NamedTuple):
    """A verdict, and the scan that it rests on."""

    checked: Checked
    scan: Scan


class Loaders:
    """A process with the real loaders, and the folder from which they load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, examples: dict[str, list[Files]]) -> None:
        """Start it; `examples` of each kind are loaded once, for what loaders import late is refused later."""
        for kind, several in examples.items():
            for number, files in enumerate(several):
                place = self.folder / "examples" / LOADER_OF.get(kind, kind)
                write(place / f"{kind}-{number}{suffix_of(files)}", files)
        command = [sys.executable, "-m", "support.loader_worker", self.folder / "examples", self.folder]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=_ENVIRONMENT, cwd=TESTS
        )

    def load(self, path: Path) -> dict[str, dict[str, object]]:
        """What each loader made of it."""
        assert self._process is not None
        self._process.stdin.write(f"{path}\n".encode())
        length = struct.unpack("<I", self._read(4))[0]
        return {answer["loader"]: answer for answer in json.loads(self._read(length))}

    def _read(self, length: int) -> bytes:
        found = b""
        while len(found) < length:
            piece = self._process.stdout.read(length - len(found))
            assert piece, "the process with the loaders has ended"
            found += piece
        return found

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait(60)


def suffix_of(files: Files) -> str:
    """The suffix of a checkpoint that is one file; "" for a folder."""
    return Path(next(iter(files))).suffix if len(files) == 1 else ""


def write(path: Path, files: Files) -> None:
    """Write a checkpoint: one file, or a folder of several."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(files) == 1:
        path.write_bytes(next(iter(files.values())))
        return
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)


def place_for(folder: Path, kind: str, files: Files) -> Path:
    """Where a mutant of this kind lies."""
    return folder / LOADER_OF.get(kind, kind) / f"net{suffix_of(files)}"


def judge(path: Path) -> Judged:
    """The verdict on what lies there, as `verify` gives it for a stray file or folder."""
    storage = open_storage(path.parent)
    if path.is_dir():
        checkpoint = folder_as_checkpoint(path.name, storage.list(path.name, recursive=True))
        assert checkpoint is not None
    else:
        entry = storage.stat(path.name)
        checkpoint = Checkpoint(path=path.name, layout=LAYOUT.name, series="net", step=None, entries=(entry,))
    scans: list[Scan] = []

    def scanner(*arguments):
        scans.append(inline(*arguments))
        return scans[-1]

    kind = "checkpoint" if path.is_dir() else "file"
    target = Target(url=str(path), kind=kind, storage=storage, checkpoint=checkpoint)
    found = StrayJudge(target, QUICK, None, None, Work(scanner=scanner)).judge(checkpoint)
    return Judged(found, scans[0])


def violation(path: Path, judged: Judged, answers: dict[str, dict[str, object]]) -> str | None:
    """What of the law a verdict of GOOD breaks; None if nothing."""
    assert judged.checked.outcome is Outcome.GOOD
    if any("refused" in a for a in answers.values()) and not any("tensors" in a for a in answers.values()):
        return None  # it would do what is not allowed here
    loaded = {name: a for name, a in answers.items() if "tensors" in a}
    if not loaded:
        return f"loads nowhere: {[a.get('error') for a in answers.values()]}"
    strict = answers.get("weights_only", {})
    if "error" in strict and not _NOT_FOR_WEIGHTS.search(str(strict["error"])):
        return f"weights_only refuses it: {strict['error']}"
    told = any(f.check == "finite" for f in judged.checked.findings)
    claims = {file.entry.key: claims_of(path, file) for file in judged.scan.files}
    every = {claim for of_file in claims.values() for several in of_file.values() for claim in several}
    for name, answer in loaded.items():
        if answer["bad"] and not told:
            return f"{name} yields what is not finite, silently: {answer['bad']}"
        for tensor, dtype, shape, digest in answer["tensors"]:
            claim = (dtype.removeprefix("numpy."), tuple(shape), digest)
            in_pickle = dtype != claim[0] and path.parent.name != "numpy"  # its numbers are in the pickle's own digest
            if digest is None or 0 in shape or in_pickle or claim[0] not in DTYPES:
                continue
            named = {c for of_file in claims.values() for c in of_file.get(tensor, ())}
            if not {claim, (*claim[:2], PACKED)} & (named or every) and not told:
                return f"{name} yields another {tensor}: {claim}, scanned as {sorted(named, key=str)}"
    return None


def claims_of(path: Path, file: ScannedFile) -> dict[str, set[tuple[str, tuple[int, ...], str]]]:
    """(dtype, shape, digest of its elements) of the tensors of a file by name, by the places that the scan states."""
    data = (path / Path(file.entry.key).name if path.is_dir() else path).read_bytes()
    claims: dict[str, set[tuple[str, tuple[int, ...], str]]] = {}
    for tensor in file.structure.tensors:
        if tensor.span is None or tensor.dtype not in DTYPES:
            continue
        span, size = file.structure.spans[tensor.span], DTYPES[tensor.dtype].size
        if not 0 < tensor.stop * size <= span.length:
            claims.setdefault(tensor.name, set()).add((tensor.dtype, tensor.shape, PACKED))
            continue
        raw = np.frombuffer(data, f"V{size}", span.length // size, span.offset)[tensor.start : tensor.stop]
        if tensor.strides:
            steps = tuple(step * size for step in tensor.strides)
            raw = np.lib.stride_tricks.as_strided(raw, tensor.shape, steps)
        if tensor.byte_order == "big" and size > 1:
            half = size // 2 if tensor.dtype.startswith("complex") else size
            raw = np.ascontiguousarray(raw).view(np.uint8).reshape(-1, half)[:, ::-1]
        elements = np.ascontiguousarray(raw).tobytes()
        if tensor.dtype == "bool":
            elements = bytes(map(bool, elements))  # any other byte than 0 is true, and copied as 1
        digest = hashlib.sha256(elements).hexdigest()
        claims.setdefault(tensor.name, set()).add((tensor.dtype, tensor.shape, digest))
    return claims


def forget(path: Path) -> None:
    """Remove a mutant."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
