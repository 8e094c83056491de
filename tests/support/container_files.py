"""Archives of files, GGUF and HDF5, as their real writers leave them."""

from __future__ import annotations

import base64
import gzip
import io
import json
import pickle
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import gguf
import h5py
import numpy as np
import torch

from support.format_files import torch_bytes

Tensors = Mapping[str, torch.Tensor]
Files = Iterable[tuple[str, bytes]]


def zip_of(files: Files, how: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive of these files."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", how) as archive:
        for name, content in files:
            archive.writestr(zipfile.ZipInfo(name), content, how)
    return target.getvalue()


def tar_of(files: Files, *, of_folder: bool = True) -> bytes:
    """A tar archive of these files, and of the folder that they are in. It ends where its content does."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        if of_folder:
            folder = tarfile.TarInfo("./")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
        for name, content in files:
            info = tarfile.TarInfo(f"./{name}" if of_folder else name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        end = archive.offset
    return target.getvalue()[: end + 1024]


def baselines_data(serialized: bytes = pickle.dumps({"n": 3}, 4), steps: int = 128) -> bytes:
    """What stable-baselines3 writes as ``data``: settings, counters, and pickles in base64."""
    schedule = {":type:": "<class 'x'>", ":serialized:": base64.b64encode(serialized).decode()}
    return json.dumps({"lr_schedule": schedule, "num_timesteps": steps, "gamma": 0.99, "seed": None}).encode()


def baselines_files(policy: Tensors, serialized: bytes | None = None, steps: int = 128) -> list[tuple[str, bytes]]:
    """The files of a save of stable-baselines3, in its order."""
    moments = {"state": {0: {"step": torch.tensor(4.0), "exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]}
    data = baselines_data(steps=steps) if serialized is None else baselines_data(serialized, steps)
    return [
        ("data", data),
        ("pytorch_variables.pth", torch_bytes(None)),
        ("policy.pth", torch_bytes(dict(policy))),
        ("policy.optimizer.pth", torch_bytes(moments)),
        ("_stable_baselines3_version", b"2.9.2"),
        ("system_info.txt", b"- OS: Linux\n"),
    ]


def baselines_zip(policy: Tensors, steps: int = 128) -> bytes:
    """A save of stable-baselines3."""
    return zip_of(baselines_files(policy, steps=steps))


def nemo_files(weights: Tensors) -> list[tuple[str, bytes]]:
    """The files of a ``.nemo``."""
    config = b"name: model\noptim:\n  lr: 0.1\n"
    return [("model_config.yaml", config), ("0fab_tokenizer.model", b"\n\x0b\n" + bytes(range(256)) * 8),
            ("model_weights.ckpt", torch_bytes(dict(weights)))]  # fmt: skip


def nemo_tar(weights: Tensors, *, compressed: bool = False) -> bytes:
    """A save of NeMo: a tar, which older versions compress."""
    raw = tar_of(nemo_files(weights))
    return gzip.compress(raw, mtime=0) if compressed else raw


def gguf_bytes(tensors: Mapping[str, np.ndarray], quantised: Mapping[str, tuple[str, np.ndarray]] = {}) -> bytes:
    """What llama.cpp's own writer writes. `quantised` maps names to a type and the blocks' bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_context_length(128)
        writer.add_token_list(["<s>", "</s>", "a"] * 40)
        writer.add_array("scores", [0.5, -1.0])
        for name, array in tensors.items():
            writer.add_tensor(name, array)
        for name, (kind, blocks) in quantised.items():
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def hdf5_of(fill: Callable[[h5py.File], None]) -> bytes:
    """An HDF5 file of what `fill` puts into it."""
    with tempfile.TemporaryDirectory() as folder:
        with h5py.File(Path(folder) / "file.h5", "w") as file:
            fill(file)
        return (Path(folder) / "file.h5").read_bytes()


def hdf5_bytes(arrays: Mapping[str, np.ndarray], **options: object) -> bytes:
    """An HDF5 file of these datasets, by their paths."""

    def fill(file: h5py.File) -> None:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **(options if array.shape else {}))

    return hdf5_of(fill)


def keras_arrays(kernel: np.ndarray) -> dict[str, np.ndarray]:
    """The datasets of a small model of Keras 3, with its optimizer."""
    return {
        "layers/dense/vars/0": kernel,
        "layers/dense/vars/1": np.zeros(kernel.shape[-1:], np.float32),
        "optimizer/vars/0": np.asarray(7, np.int32),
        "optimizer/vars/2": np.ones(kernel.shape, np.float32),
    }


def keras_zip(kernel: np.ndarray) -> bytes:
    """A ``.keras`` file."""
    weights = hdf5_bytes(keras_arrays(kernel))
    files = [("metadata.json", b'{"keras_version": "3.15.1"}'), ("config.json", b"{}"), ("model.weights.h5", weights)]
    return zip_of(files)
