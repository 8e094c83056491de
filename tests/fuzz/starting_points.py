"""Small files as the real writers make them: where the fuzzers begin, and what must be accepted."""

from __future__ import annotations

import collections
import io
import pickle
import tempfile
import warnings
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed.checkpoint
from fuzz.targets import CHOICES
from safetensors.torch import save
from support.format_files import safetensors_bytes, some_tensors, torch_bytes

from ckptguard.formats.table import LEGACY_MAGICS
from ckptguard.records.incidents import Incident
from ckptguard.records.kept import KeptCopy
from ckptguard.values.manifest import File, Manifest, Span, Tensor
from ckptguard.values.record_text import encode_checked
from ckptguard.values.verdict import Finding, Outcome, Severity, Verdict


def starting_points(what: str) -> list[bytes]:
    """Valid inputs for one target; targets without any of their own begin with nothing."""
    make = _MAKERS.get(what)
    return make() if make else []


def _pickles() -> list[bytes]:
    values = [
        {"lr": 0.1, "seen": [1, 2, 3], "name": "run", "none": None, "flag": (True, False)},
        collections.OrderedDict(a=1.5, b=float("inf")),
        {"rng": np.random.RandomState(0).get_state()[2:], "array": np.arange(3.0), "big": 2**70, "neg": -5},
        ({1, 2}, frozenset({"x"}), b"raw", "\u20ac", bytearray(b"z"), 300, 70_000),
        [[[]], ((),), {}],
    ]
    return [pickle.dumps(value, protocol) for value in values for protocol in range(6)]


def _archives() -> list[bytes]:
    model = torch.nn.Linear(2, 2)
    return [
        torch_bytes({"w": torch.arange(4.0), "b": torch.ones(2)}),
        torch_bytes(model.state_dict()),
        torch_bytes({"step": 3}),
    ]


def _safetensors() -> list[bytes]:
    files = [
        save({"w": torch.arange(4.0)}, {"format": "pt"}),
        safetensors_bytes(some_tensors()),
        save({}),
        save({"a": torch.zeros(0, 3), "b": torch.tensor(1.0), "c": torch.ones(2, dtype=torch.bfloat16)}),
    ]
    parts = [(file[8 : 8 + int.from_bytes(file[:8], "little")], file) for file in files]
    whole = [header + b"\0" + file[8 + len(header) :] for header, file in parts]
    return [*whole, CHOICES + bytes(range(60)), CHOICES + bytes(40)]


def _legacy() -> list[bytes]:
    values = [{"w": torch.arange(4.0)}, {"step": 3}]
    return [torch_bytes(v, _use_new_zipfile_serialization=False).removeprefix(LEGACY_MAGICS[0]) for v in values]


def _dcp() -> list[bytes]:
    states = [{"w": torch.arange(6.0).view(2, 3), "step": 3}, {"model": {"a": torch.ones(2)}, "lr": [0.5]}]
    states.append({f"w{n}": torch.ones(2) for n in range(12)})  # described again and again with the same bytes
    found = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, state in enumerate(states):
            torch.distributed.checkpoint.save(state, checkpoint_id=f"{folder}/{number}", no_dist=True)
            found.append(Path(folder, str(number), ".metadata").read_bytes())
    return found


def _npy() -> list[bytes]:
    arrays = [np.arange(3.0), np.ones((2, 3), ">f4", order="F"), np.zeros((0, 2), "i8"), np.array(True)]
    arrays += [np.zeros(2, [("a", "<f4"), ("b", "i2", (2,))]), np.array(["a", "bc"]), np.array([{}, 1], object)]
    found = []
    for array in arrays:
        target = io.BytesIO()
        np.save(target, array)
        found.append(target.getvalue())
    return found


def _npz() -> list[bytes]:
    found = []
    for write in (np.savez, np.savez_compressed):
        target = io.BytesIO()
        write(target, np.arange(3.0), b=np.ones((2, 2), "f2", order="F"))
        found.append(target.getvalue())
    return found


def _json() -> list[bytes]:
    return [
        b'{"metadata": {"total_size": 8}, "weight_map": {"w": "model-00001-of-00002.safetensors"}}',
        b'{"global_step": 8, "epoch": 1.5, "log_history": [{"loss": 0.0, "grad_norm": NaN, "step": 8}]}',
        b'{"ckptguard_state": 1, "optimizer": {"lr": 0.1, "scale": {"$float": "inf"}}, "scheduler": [1, {"x": 1}]}',
    ]


def _records() -> list[bytes]:
    tensor = Tensor("w", "float32", (2, 2), 0, "model", 1.5, 0.5)
    file = File(path="a/b.pt", size=9, format="torch_zip", envelope="ab", spans=(Span(0, 9, "cd"),), tensors=(tensor,))
    shared = {"series": "a-#", "step": 5, "generation": 1}
    manifest = Manifest(
        **shared,
        path="a-5",
        layout="file",
        digest_origin="observer",
        sealed_at="",
        version="1",
        nonce="n",
        files=(file,),
    )
    finding = Finding(check="digests", severity=Severity.ERROR, message="m", file="f", tensor="t", count=3)
    verdict = Verdict(**shared, outcome=Outcome.BAD, findings=(finding,), checked_at="", version="1")
    kept = KeptCopy(**shared, path="a-5", how="link", files=("a-5",), sources=((1, 2, 3, None),), kept_at="")
    incident = Incident(id="i", step=5, cause="numeric", reason="r", evidence={"x": 1.5}, opened_at="", source="cli")
    checked = [encode_checked(manifest).rpartition(b"crc32 ")[0], encode_checked(verdict).rpartition(b"crc32 ")[0]]
    return [*checked, msgspec.json.encode(kept), msgspec.json.encode(incident), b'{"format": 1}']


def _any() -> list[bytes]:
    files = (
        (0, _archives()),
        (2, _safetensors()),
        (3, _pickles()),
        (4, [LEGACY_MAGICS[0] + text for text in _legacy()]),
    )
    return [bytes([number]) + data for number, made in files for data in made]


def _check_sums() -> list[bytes]:
    return [b"d41d8cd98f00b204e9800998ecf8427e  a/b.pt\n", b"MD5 (x y) = d41d8cd98f00b204e9800998ecf8427e\n"]


_MAKERS = {
    "pickle": _pickles,
    "zip": _archives,
    "safetensors": _safetensors,
    "dcp": _dcp,
    "npy": _npy,
    "npz": _npz,
    "legacy": _legacy,
    "json": _json,
    "records": _records,
    "any": _any,
    "check_sums": _check_sums,
}
