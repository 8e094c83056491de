"""Where pickles lie in what people load: each function puts one into a container and says what to verify."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import json
import pickle
import struct
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint
from support.container_files import baselines_files, tar_of, zip_of
from support.format_files import safetensors_bytes, torch_archive, torch_bytes

from ckptguard.formats.table import LEGACY_MAGICS

Container = Callable[[Path, bytes], Path]
_MODEL = safetensors_bytes({"w": torch.arange(4.0)})
_STATE = json.dumps({"global_step": 5, "log_history": []}).encode()


def _file(name: str, wrap: Callable[[bytes], bytes] = lambda data: data) -> Container:
    def put(folder: Path, data: bytes) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(wrap(data))
        return folder / name

    return put


def _trainer(name: str, wrap: Callable[[bytes], bytes] = lambda data: data) -> Container:
    """A Trainer's checkpoint, whole but for the file in question."""

    def put(folder: Path, data: bytes) -> Path:
        target = folder / "checkpoint-5"
        target.mkdir(parents=True)
        (target / "model.safetensors").write_bytes(_MODEL)
        (target / "trainer_state.json").write_bytes(_STATE)
        (target / name).write_bytes(wrap(data))
        return target

    return put


def legacy(data: bytes) -> bytes:
    """The old torch format: magic number, protocol, system, state, keys of storages."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    return LEGACY_MAGICS[0] + pickle.dumps(1001, 2) + pickle.dumps(system, 2) + data + pickle.dumps([], 2)


def tar(data: bytes) -> bytes:
    """What torch wrote before that: a tar archive of pickles."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in (("storages", pickle.dumps(0, 2)), ("tensors", pickle.dumps(0, 2)), ("pickle", data)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def torchscript(data: bytes) -> bytes:
    """An archive as torch.jit saves it, with the pickle as its constants' neighbour."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in (("data.pkl", data), ("constants.pkl", data), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return target.getvalue()


def npy(data: bytes) -> bytes:
    """An array of objects, which numpy pickles."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def npz(data: bytes, name: str = "arr_0.npy", how: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of one array of objects. numpy looks at a record's first bytes, not at its name."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), npy(data), how)
    return target.getvalue()


@functools.cache
def _distributed_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is all there is
        state = {"w": torch.ones(2), "extra": {"a": 1}}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _distributed(folder: Path, data: bytes) -> Path:
    """A checkpoint of torch.distributed.checkpoint with this `.metadata`."""
    target = folder / "step-5"
    target.mkdir(parents=True)
    for name, content in _distributed_files().items():
        (target / name).write_bytes(data if data and name == ".metadata" else content)
    return target


def _distributed_object(folder: Path, data: bytes) -> Path:
    """One whose `.metadata` says that an object lies where this pickle was appended to the `.distcp`."""
    target = _distributed(folder, b"")
    metadata = pickle.loads(_distributed_files()[".metadata"])
    index = next(i for i in metadata.storage_data if i.fqn.startswith("extra"))
    place = metadata.storage_data[index]
    file = target / place.relative_path
    archive = torch_archive(data)
    metadata.storage_data[index] = dataclasses.replace(place, offset=file.stat().st_size, length=len(archive))
    file.write_bytes(file.read_bytes() + archive)
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    return target


def _among_others(name: str, how: int | None = zipfile.ZIP_STORED) -> Callable[[bytes], bytes]:
    """An archive of a whole model and this file; a tar if there is no way to zip it."""

    def wrap(data: bytes) -> bytes:
        files = [("policy.pth", torch_bytes({"w": torch.arange(4.0)})), (name, data)]
        return tar_of(files) if how is None else zip_of(files, how)

    return wrap


def _settings_of(data: bytes) -> bytes:
    """An archive of stable-baselines3 whose settings hold the pickle."""
    return zip_of(baselines_files({"w": torch.arange(4.0)}, data))


CONTAINERS: dict[str, Container] = {
    "pickle in a zip": _file("agent_5_steps.zip", _among_others("extra.pkl")),
    "archive in a zip": _file("agent_5_steps.zip", lambda data: _among_others("critic.pth")(torch_archive(data))),
    "deflated in a zip": _file(
        "agent_5.zip", lambda data: _among_others("critic.pth", zipfile.ZIP_DEFLATED)(torch_archive(data))
    ),
    "settings in a zip": _file("agent_5_steps.zip", _settings_of),
    "pickle in a tar": _file("asr.nemo", _among_others("extra.pkl", None)),
    "archive in a tar": _file("asr.nemo", lambda data: _among_others("model_weights.ckpt", None)(torch_archive(data))),
    "archive in a compressed tar": _file(
        "asr.nemo", lambda data: gzip.compress(_among_others("model_weights.ckpt", None)(torch_archive(data)))
    ),
    "objects in .npz in a zip": _file("agent_5.zip", lambda data: _among_others("arrays.npz")(npz(data))),
    "torch archive": _file("model.pt", torch_archive),
    "archive named .ckpt": _file("epoch=0-step=5.ckpt", torch_archive),
    "archive named .bin": _file("pytorch_model.bin", torch_archive),
    "archive named .pkl": _file("state.pkl", torch_archive),
    "legacy file": _file("model.pth", legacy),
    "bare pickle": _file("state.pkl"),
    "bare .pickle": _file("state.pickle"),
    "bare .bin": _file("optimizer.bin", lambda data: data if data[:1] == b"\x80" else b"\x80\x02" + data),
    "tar": _file("model.tar.pth", tar),
    "TorchScript": _file("model.pt", torchscript),
    "objects in .npy": _file("array.npy", npy),
    "objects in .npz": _file("arrays.npz", npz),
    "objects under another name in .npz": _file("arrays.npz", lambda data: npz(data, "readme.txt", zipfile.ZIP_STORED)),
    "objects deflated in .npz": _file("arrays.npz", lambda data: npz(data, "arr_0.npy", zipfile.ZIP_DEFLATED)),
    "objects deflated under another name": _file("arrays.npz", lambda data: npz(data, "readme", zipfile.ZIP_DEFLATED)),
    ".metadata": _distributed,
    ".distcp": _distributed_object,
    "training_args.bin": _trainer("training_args.bin", torch_archive),
    "rng_state.pth": _trainer("rng_state.pth", torch_archive),
    "legacy scaler.pt": _trainer("scaler.pt", legacy),
    "custom_checkpoint_0.pkl": _trainer("custom_checkpoint_0.pkl"),
}
_ARGUMENTS = pickle.dumps({"lr": 0.1, "seen": [1, 2, 3], "args": ("a", None, True)}, 2)
_WEIGHTS = {"w": torch.arange(4.0), "args": ("a", None, True)}
# What nobody could mind, in the same container under the same name; the rest take `_ARGUMENTS`.
_BENIGN: dict[str, Container] = {
    "torch archive": _file("model.pt", lambda data: torch_bytes(_WEIGHTS)),
    "archive named .ckpt": _file("epoch=0-step=5.ckpt", lambda data: torch_bytes(_WEIGHTS)),
    "archive named .bin": _file("pytorch_model.bin", lambda data: torch_bytes(_WEIGHTS)),
    "legacy file": _file("model.pth", lambda data: torch_bytes(_WEIGHTS, _use_new_zipfile_serialization=False)),
    "bare .bin": _file("scheduler.bin"),
    ".metadata": lambda folder, data: _distributed(folder, b""),
    # These two are not read; what is benign there is the same weights in a container that is.
    "tar": _file("model.pth", lambda data: torch_bytes(_WEIGHTS, _use_new_zipfile_serialization=False)),
    "TorchScript": _file("model.pt", lambda data: torch_bytes(_WEIGHTS)),
}


def benign_of(container: str, folder: Path) -> Path:
    """A benign file in this container."""
    return _BENIGN.get(container, CONTAINERS[container])(folder, _ARGUMENTS)
