"""Simulated trainers for the soak: what each kind of trainer writes into its run, byte by byte, without torch.

Every write, rename and removal goes through `Files`, which keeps the digest of each file that the trainer or its user
has there. So whoever looks later can say what must be there, without asking ckptguard.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
from support.tiny_files import safetensors_head

Steps = Generator[None, None, None]
"""A save, one write after the other: the caller may pause between two, or drop the rest, as a kill does."""


def digest_of(path: Path) -> str:
    """What is under a path: a link's target, or a digest of a file's bytes."""
    if path.is_symlink():
        return f"-> {os.readlink(path)}"
    return digest(path.read_bytes())


def digest(data: bytes) -> str:
    """A digest of bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Files:
    """The files that a user and a trainer have in one folder, and their digests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.digests: dict[str, str] = {}  # by the path in the folder

    def write(self, name: str, data: bytes) -> None:
        """Write a file at once. What a full disk took of it is on the list, too."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.write_bytes(data)
        except OSError:
            if path.exists():
                self.digests[name] = digest_of(path)
            raise
        self.digests[name] = digest(data)

    def write_slowly(self, name: str, data: bytes) -> Steps:
        """Write a file under its own name, in two parts."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        half = len(data) // 2
        try:
            with path.open("wb", buffering=0) as file:
                self.digests[name] = digest(b"")
                _write_all(file, data[:half])
                self.digests[name] = digest(data[:half])
                yield
                _write_all(file, data[half:])
        except OSError:
            self.digests[name] = digest_of(path)
            raise
        self.digests[name] = digest(data)

    def write_and_rename(self, name: str, data: bytes) -> Steps:
        """Write a file under another name, and rename it."""
        path = self.root / name
        temporary = str(Path(name).with_name(f".tmp-{path.name}"))
        yield from self.write_slowly(temporary, data)
        self.rename(temporary, name)

    def rename(self, old: str, new: str) -> None:
        """Give a file or a folder another name."""
        (self.root / old).replace(self.root / new)
        for name in [n for n in self.digests if n == old or n.startswith(f"{old}/")]:
            self.digests[new + name.removeprefix(old)] = self.digests.pop(name)

    def link(self, name: str, target: str) -> None:
        """Have a symbolic link point to a file."""
        temporary = self.root / f".tmp-{name}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(self.root / name)
        self.digests[name] = f"-> {target}"

    def remove(self, name: str) -> None:
        """Remove a file or a folder, as rotation does."""
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        for known in [n for n in self.digests if n == name or n.startswith(f"{name}/")]:
            del self.digests[known]

    def below(self, name: str) -> dict[str, str]:
        """The digests of a checkpoint's files."""
        return {n: of for n, of in self.digests.items() if n == name or n.startswith(f"{name}/")}


def _write_all(file: io.RawIOBase, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


# What is in the files


def numbers(seed: int, count: int, *, sick: bool = False) -> bytes:
    """So many floats, different for each seed."""
    made = np.random.default_rng(seed).standard_normal(count).astype("<f4")
    if sick:
        made[count // 2] = np.nan
    return made.tobytes()


def safetensors(tensors: dict[str, bytes]) -> bytes:
    """A file of safetensors with vectors of floats."""
    return safetensors_head({name: [len(data) // 4] for name, data in tensors.items()}) + b"".join(tensors.values())


def torch_file(step: int, tensors: dict[str, bytes]) -> bytes:
    """A file as `torch.save` writes it, of ``{"step": step, name: tensor}``."""
    words = [b"\x80\x02}(", _text("step"), b"J", struct.pack("<i", step)]
    for key, (name, data) in enumerate(tensors.items()):
        count = b"J" + struct.pack("<i", len(data) // 4)
        storage = b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text(str(key)) + _text("cpu") + count + b"tQ"
        words += [_text(name), b"ctorch._utils\n_rebuild_tensor_v2\n("]
        words += [storage, b"K\x00", count, b"\x85", b"K\x01\x85", b"\x89", b"ccollections\nOrderedDict\n)R", b"tR"]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"".join([*words, b"u."]))
        archive.writestr("archive/byteorder", "little")
        for key, data in enumerate(tensors.values()):
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", "3\n")
    return made.getvalue()


def _text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


# The trainers


class Trainer:
    """How one kind of trainer saves and rotates. `name(step)` is the checkpoint of a step, as ckptguard calls it."""

    fixed = False  # each save has the name of the one before

    def __init__(self, size: int, keep: int) -> None:
        self.size, self.keep = size, keep  # floats of a save, and saves that stay

    def name(self, step: int) -> str:
        """The path of a step's checkpoint in the run."""
        raise NotImplementedError

    def save(self, files: Files, step: int, seed: int, *, sick: bool) -> Steps:
        """Write a save."""
        raise NotImplementedError

    def state(self, seed: int, *, sick: bool) -> dict[str, bytes]:
        """Its model and what an optimizer holds."""
        half = self.size // 2
        return {"model.weight": numbers(seed, half, sick=sick), "optimizer.exp_avg": numbers(seed + 1, half)}

    def pointers(self) -> tuple[str, ...]:
        """The files and links of the run that name the newest checkpoint."""
        return ()


class HfTrainer(Trainer):
    """``checkpoint-10/`` with weights, optimizer and state, written file by file under their own names."""

    def name(self, step: int) -> str:
        return f"checkpoint-{step}"

    def save(self, files: Files, step: int, seed: int, *, sick: bool) -> Steps:
        folder, state = self.name(step), self.state(seed, sick=sick)
        files.write(f"{folder}/config.json", b'{"hidden_size": 4}')
        yield from files.write_slowly(
            f"{folder}/model.safetensors", safetensors({"model.weight": state["model.weight"]})
        )
        yield
        moments = {"exp_avg": state["optimizer.exp_avg"]}
        yield from files.write_slowly(f"{folder}/optimizer.pt", torch_file(step, moments))
        files.write(f"{folder}/scheduler.pt", torch_file(step, {}))
        text = json.dumps({"global_step": step, "max_steps": 10**6, "log_history": []})
        files.write(f"{folder}/trainer_state.json", text.encode())


class Shards(Trainer):
    """``step-10/`` with two shards and an index, made under another name and renamed as a whole."""

    def name(self, step: int) -> str:
        return f"step-{step}"

    def save(self, files: Files, step: int, seed: int, *, sick: bool) -> Steps:
        made, state = f"tmp-step-{step}", self.state(seed, sick=sick)
        files.remove(made)
        shards = {f"model-{n + 1:05}-of-00002.safetensors": name for n, name in enumerate(state)}
        for shard, name in shards.items():
            files.write(f"{made}/{shard}", safetensors({name: state[name]}))
            yield
        index = {"metadata": {"total_size": self.size * 4}, "weight_map": {name: of for of, name in shards.items()}}
        files.write(f"{made}/model.safetensors.index.json", json.dumps(index).encode())
        files.remove(self.name(step))
        files.rename(made, self.name(step))


class NumberedFiles(Trainer):
    """``net-10.safetensors``, by a rename."""

    def name(self, step: int) -> str:
        return f"net-{step}.safetensors"

    def save(self, files: Files, step: int, seed: int, *, sick: bool) -> Steps:
        yield from files.write_and_rename(self.name(step), safetensors(self.state(seed, sick=sick)))


class WithPointer(Trainer):
    """``epoch_10.pt`` under its own name, and ``latest`` with that name in it."""

    def name(self, step: int) -> str:
        return f"epoch_{step}.pt"

    def save(self, files: Files, step: int, seed: int, *, sick: bool) -> Steps:
        yield from files.write_slowly(self.name(step), torch_file(step, self.state(seed, sick=sick)))
        files.write("latest", self.name(step).encode())

    def pointers(self) -> tuple[str, ...]:
        return ("latest",)


class WithLink(Trainer):
    """``step_10.pt`` by a rename, and a link ``last.pt`` to it."""

    def name(self, step: int) -> str:
        return f"step_{step}.pt"

    def save(self, files: Files, step: int, seed: int, *, sick: bool) -> Steps:
        yield from files.write_and_rename(self.name(step), torch_file(step, self.state(seed, sick=sick)))
        files.link("last.pt", self.name(step))

    def pointers(self) -> tuple[str, ...]:
        return ("last.pt",)


class OnlyTheLast(NumberedFiles):
    """``model-10.pt`` under its own name; the one before is removed after it."""

    def name(self, step: int) -> str:
        return f"model-{step}.pt"

    def save(self, files: Files, step: int, seed: int, *, sick: bool) -> Steps:
        yield from files.write_slowly(self.name(step), torch_file(step, self.state(seed, sick=sick)))


class InPlace(Trainer):
    """``ckpt.pt``, written over itself."""

    fixed = True

    def name(self, step: int) -> str:
        return "ckpt.pt"

    def save(self, files: Files, step: int, seed: int, *, sick: bool) -> Steps:
        yield from files.write_slowly("ckpt.pt", torch_file(step, self.state(seed, sick=sick)))


class ByRename(InPlace):
    """``ckpt.pt``, by a rename."""

    def save(self, files: Files, step: int, seed: int, *, sick: bool) -> Steps:
        yield from files.write_and_rename("ckpt.pt", torch_file(step, self.state(seed, sick=sick)))


KINDS: tuple[Callable[[int, int], Trainer], ...] = (
    HfTrainer,
    NumberedFiles,
    InPlace,
    ByRename,
    WithPointer,
    OnlyTheLast,
    Shards,
    WithLink,
)


# What users have beside their checkpoints

USER_FILES: dict[str, Callable[[str], str]] = {
    "notes.txt": lambda name: f"the best one is {name}, see README\n",
    "README.md": lambda name: f"# Training\n\nResume from {name}.\n",
    "best.csv": lambda name: f"metric,checkpoint\n0.3,{name}\n",
    "log.csv": lambda name: "step,loss,checkpoint\n",
    "config.yaml": lambda name: f"resume: {name}\nlr: 0.1\n",
    "tmp-rollback-experiment/notes.txt": lambda name: f"tried to go back to {name}\n",
    "tmp-rollback-0123abcd/data.txt": lambda name: "mine\n",
    "tmp-repair-0123abcd/data.txt": lambda name: "mine\n",
    ".tmp-0123abcd": lambda name: "mine\n",
    ".tmp-repair-0123abcd/data.txt": lambda name: "mine\n",
    "held.notes.held": lambda name: f"{name}\n",
    "_ckptguard_old/notes.txt": lambda name: f"{name}\n",
    "notes.damaged-0123abcd": lambda name: f"{name}\n",
    "000000000010.1.json": lambda name: "{}\n",
}
"""Files whose names or words look like ours, or like pointers, and are neither. Each gets a checkpoint's name."""


def add_user_files(files: Files, chance: random.Random, name: str) -> None:
    """Some of these files."""
    for path in chance.sample(sorted(USER_FILES), chance.randint(2, 6)):
        files.write(path, USER_FILES[path](name).encode())
