"""The law between a verdict and the loaders: GOOD means that they load it and yield what was scanned, all finite."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

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
from support.mutants import Files
from support.runs import QUICK
from support.tiny_run import inline

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
