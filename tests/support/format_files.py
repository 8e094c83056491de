"""Files as the real writers make them, and how tests read their structure."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from ckptguard.formats import Structure, read_structure
from ckptguard.scan import Scan, ScanOptions, scan_files
from ckptguard.scan.result import ScannedFile
from ckptguard.storage import open_storage

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def structure_of(folder: Path, name: str, data: bytes) -> Structure:
    """Write bytes under a name and read their structure."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    with open_storage(folder).open(name) as reader:
        return read_structure(reader, name)


def scan_of(folder: Path, name: str, data: bytes, options: ScanOptions | None = None) -> Scan:
    """Write bytes under a name and scan them."""
    (folder / name).write_bytes(data)
    return scan_files(open_storage(folder), [name], options or ScanOptions())


def torch_bytes(value: object, **options: object) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def safetensors_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    """What safetensors writes."""
    return save(tensors)


def npz_bytes(arrays: Mapping[str, object], *, deflated: bool = False) -> bytes:
    """What numpy.savez and numpy.savez_compressed write."""
    buffer = io.BytesIO()
    (np.savez_compressed if deflated else np.savez)(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def bad_numbers(file: ScannedFile) -> dict[str, tuple[int, int, int | None]]:
    """(NaN, infinities, first index) of each tensor that has some."""
    return {
        t.name: (n.nan, n.posinf + n.neginf, n.first_bad)
        for t, n in zip(file.structure.tensors, file.numbers, strict=True)
        if n is not None and n.first_bad is not None
    }


def some_tensors() -> dict[str, torch.Tensor]:
    """A small model's worth of tensors of several types."""
    generator = torch.Generator().manual_seed(7)
    made = {str(d).removeprefix("torch."): torch.randn(3, 5, generator=generator).to(d) for d in FLOATS}
    made["ids"] = torch.arange(6)
    made["mask"] = torch.tensor([True, False])
    made["none"] = torch.zeros(0, 4)
    made["scalar"] = torch.tensor(2.5)
    return made


def repacked(data: bytes, **changed: bytes) -> bytes:
    """A torch archive with some records replaced (``__`` in a keyword stands for the dot of ``data.pkl``)."""
    wanted = {name.replace("__", "."): text for name, text in changed.items()}
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            inner = info.filename.partition("/")[2]
            new.writestr(zipfile.ZipInfo(info.filename), wanted.get(inner, old.read(info)))
    return target.getvalue()


def torch_archive(data_pkl: bytes) -> bytes:
    """A small torch archive around a pickle of one's own."""
    return repacked(torch_bytes({}), data__pkl=data_pkl)


def pickled(value: object, protocol: int = 2) -> bytes:
    """A plain pickle."""
    return pickle.dumps(value, protocol)
