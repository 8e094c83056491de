"""Trainers as the model of one run knows them: their names, their ways of writing, and every content they ever wrote.

A content is what lies under one path: the bytes of a file (under the name ""), or those of a folder's files. The model
knows of each whether it is whole and finite, where in the training it was saved, and when.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import torch
from blake3 import blake3

from ckptguard.values.manifest import Manifest
from support.records_on_disk import at, files_of
from support.tiny_files import safetensors_head
from support.tiny_run import memory_path

Content = tuple[tuple[str, bytes], ...]  # by the name below the path; "" for a file itself
POINTER = "latest"
PLACES = ("epochs", "weights")  # folders in which a trainer saves, and which are no checkpoints
_OURS = ("_ckptguard", "tmp-", ".tmp-", "training.log")


@dataclass(frozen=True)
class Saved:
    """What is known of a content: where in the training it was saved, and as which of all saves."""

    whole: bool
    finite: bool
    step: int
    born: int

    @property
    def is_healthy(self) -> bool:
        """Whether a training may go on from it."""
        return self.whole and self.finite


@dataclass(frozen=True)
class Trainer:
    """How a trainer saves: under `fixed` names, which its own resume reads, and under `numbered` ones; `in_place` into
    the same file, or under another name first. `pointer`: the resume reads a file that names the newest."""

    name: str
    counter: str
    fixed: tuple[str, ...] = ()
    numbered: Callable[[int], str] | None = None
    in_place: bool = True
    folders: bool = False
    pointer: bool = False


TRAINERS = (
    Trainer("nanoGPT", "iter_num", fixed=("ckpt.pt",)),
    Trainer("YOLO", "epoch", fixed=("last.pt", "best.pt")),
    Trainer("a script", "epoch", numbered=lambda n: f"epoch_{n}.pt"),
    Trainer("open_clip", "epoch", ("epoch_latest.pt",), lambda n: f"epoch_{n}.pt"),
    Trainer("timm", "epoch", ("last.pth.tar",), lambda n: f"recovery-{n // 3}-{n % 3 * 50}.pth.tar", in_place=False),
    Trainer("fairseq", "num_updates", ("checkpoint_last.pt",), lambda n: f"checkpoint_{1 + n // 4}_{n * 500}.pt"),
    Trainer("in two folders", "epoch", ("weights/last.pt",), lambda n: f"epochs/epoch_{n}.pt"),
    Trainer("HF", "global_step", numbered=lambda n: f"checkpoint-{n}", folders=True, in_place=False),
    Trainer("DeepSpeed", "global_step", numbered=lambda n: f"global_step{n}", folders=True, pointer=True),
)


def archive(counter: str, step: int, weights: int, loss: int, *, finite: bool) -> bytes:
    """What `torch.save` writes of a training's state."""
    numbers = torch.Generator().manual_seed(weights)
    model = {name: torch.rand(3, 3, generator=numbers) + 1 for name in ("a", "b", "c")}
    if not finite:
        model["b"][1, 1] = torch.nan
    moments = {"step": torch.tensor(float(step)), "exp_avg": torch.rand(3, 3, generator=numbers)}
    state = {"model": model, "optimizer": {"state": {0: moments}, "param_groups": [{"params": [0], "lr": 0.1}]}}
    out = io.BytesIO()
    torch.save({**state, counter: step, "best_val_loss": loss / 7}, out)
    return out.getvalue()


def folder(counter: str, step: int, weights: int, loss: int, *, finite: bool) -> Content:
    """What Hugging Face's Trainer writes of it."""
    numbers = torch.Generator().manual_seed(weights)
    values = (torch.rand(18, generator=numbers) + 1).tolist()
    values[5] = values[5] if finite else float("nan")
    state = json.dumps({counter: step, "best_metric": loss, "log_history": []}).encode()
    return (
        ("config.json", b'{"hidden_size": 4}'),
        ("model.safetensors", safetensors_head(dict.fromkeys("abc", (2, 3))) + struct.pack("<18f", *values)),
        ("trainer_state.json", state),
    )


class Disk:
    """What lies in a run, as its trainer writes and sees it. Times of files rise with every write."""

    def __init__(self, url: str) -> None:
        self.url, self.in_memory = url, url.startswith("memory://")
        self._now = time.time_ns()

    def write(self, key: str, data: bytes, *, in_place: bool = True) -> None:
        """Write a file: into what lies there, or under another name first."""
        if self.in_memory:
            fsspec.filesystem("memory").pipe_file(f"{memory_path(self.url)}/{key}", data)
            return
        path = Path(self.url, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        place = path if in_place else path.with_name(f"tmp-{path.name}")
        place.write_bytes(data)
        self.touch(place)
        place.replace(path)

    def touch(self, path: Path) -> None:
        """Give a file the next time."""
        self._now = max(self._now + 1_000_000, time.time_ns())
        os.utime(path, ns=(self._now, self._now))

    def remove(self, path: str) -> None:
        """Remove what lies under a path."""
        if self.in_memory:
            for key in self._keys(path):
                fsspec.filesystem("memory").store.pop(key, None)
        elif Path(self.url, path).is_dir():
            shutil.rmtree(Path(self.url, path))
        else:
            Path(self.url, path).unlink(missing_ok=True)

    def rename(self, path: str, target: str) -> None:
        """Give what lies under a path another name, over whatever lies there."""
        if self.in_memory:
            found = self.at(path)
            self.remove(path)
            self.remove(target)
            for name, data in found or ():
                self.write(f"{target}/{name}".rstrip("/"), data)
            return
        if Path(self.url, target).is_dir():
            shutil.rmtree(Path(self.url, target))
        Path(self.url, path).replace(Path(self.url, target))

    def read(self, key: str) -> bytes | None:
        """A file's bytes."""
        if self.in_memory:
            found = fsspec.filesystem("memory").store.get(f"{memory_path(self.url)}/{key}")
            return None if found is None else bytes(found.getvalue())
        path = at(self.url, key)
        return path.read_bytes() if path.is_file() else None

    def at(self, path: str) -> Content | None:
        """The content under a path, wherever in the run that is."""
        data = self.read(path)
        if data is not None:
            return (("", data),)
        if self.in_memory:
            start = f"{memory_path(self.url)}/{path}/"
            store = fsspec.filesystem("memory").store
            return tuple(sorted((key.removeprefix(start), store[key].getvalue()) for key in self._keys(path))) or None
        return tuple(sorted(files_of(self.url, path).items())) or None

    def all(self) -> dict[str, Content]:
        """Every content of the trainer's, by its path; pointers are none."""
        if self.in_memory:
            start = f"{memory_path(self.url)}/"
            keys = [key.removeprefix(start) for key in self._keys("")]
        else:
            found = [(place, Path(self.url, place)) for place in ("", *PLACES)]
            keys = [
                f"{place}/{name}".lstrip("/") for place, path in found if path.is_dir() for name in os.listdir(path)
            ]
        parts = (key.split("/") for key in keys if key not in PLACES)
        tops = sorted({"/".join(p[:2] if p[0] in PLACES else p[:1]) for p in parts})
        tops = [top for top in tops if not top.rpartition("/")[2].startswith(_OURS) and not top.startswith(_OURS)]
        contents = {top: self.at(top) for top in tops if top != POINTER}
        return {top: content for top, content in contents.items() if content is not None}

    def _keys(self, path: str) -> list[str]:
        place = f"{memory_path(self.url)}/{path}".rstrip("/")
        return [key for key in fsspec.filesystem("memory").store if key == place or key.startswith(place + "/")]


@dataclass
class Training:
    """A training that saves into a run, and what it ever wrote there."""

    trainer: Trainer
    disk: Disk
    step: int = 0
    poisoned: bool = False
    knows: dict[Content, Saved] = field(default_factory=dict)
    _births: Iterator[int] = field(default_factory=itertools.count)
    _weights: int = 0

    def save(self, *, killed_after: int | None = None, again: bool = False) -> None:
        """Save under every name, or be killed half-way into that of number `killed_after`. `again`: no update was made
        since the last save, only what is told beside the weights is another. Archives tell that from damage."""
        again = again and not self.trainer.folders
        self.step += not again
        born = next(self._births)
        self._weights = self._weights if again else born
        words = (self.trainer.counter, self.step, self._weights, born)
        content = folder(*words, finite=not self.poisoned) if self.trainer.folders else None
        content = content or (("", archive(*words, finite=not self.poisoned)),)
        self.knows[content] = Saved(whole=True, finite=not self.poisoned, step=self.step, born=born)
        for number, path in enumerate(self.paths()):
            half = number == killed_after
            self._write(path, content, half=half)
            if half:
                lies = self.disk.at(path)
                if lies is not None and lies not in self.knows:
                    self.knows[lies] = Saved(whole=False, finite=False, step=self.step, born=born)
                return
        if self.trainer.pointer:
            self.disk.write(POINTER, self.paths()[0].encode())

    def _write(self, path: str, content: Content, *, half: bool) -> None:
        trainer = self.trainer
        if trainer.folders and not half and self.disk.at(path) is not None:
            self.disk.remove(path)  # as a trainer that saves a folder anew
        for name, data in content:
            key = f"{path}/{name}".rstrip("/")
            if not half:
                self.disk.write(key, data, in_place=trainer.in_place or trainer.folders)
            elif name != content[-1][0] or not name:
                cut = data[: len(data) // 2] if name in ("", "model.safetensors") else data
                self.disk.write(key if trainer.in_place or name else f"tmp-{path}", cut)

    def paths(self) -> list[str]:
        """Where the current step is saved, in the order of writing."""
        numbered = [self.trainer.numbered(self.step)] if self.trainer.numbered else []
        return [*numbered, *self.trainer.fixed]

    def resume(self) -> bool:
        """Go on from what the trainer's own resume reads; whether there is something that can be loaded."""
        path = self.resumes_from()
        found = self.disk.at(path) if path is not None else None
        saved = self.knows.get(found) if found is not None else None
        if saved is None or not saved.whole:
            return False
        self.step, self.poisoned = saved.step, not saved.finite
        return True

    def resumes_from(self) -> str | None:
        """The path that the trainer's own resume reads; None where it starts from scratch."""
        lies = self.disk.all()
        if self.trainer.pointer:
            word = self.disk.read(POINTER)
            return word.decode() if word is not None else None
        if self.trainer.fixed:
            return self.trainer.fixed[0] if self.trainer.fixed[0] in lies else None
        return max(lies, key=numbers, default=None)

    def wrote(self, key: str) -> bool:
        """Whether a temporary is the trainer's own."""
        return key.startswith("tmp-") and not key.startswith(("tmp-rollback-", "tmp-repair-"))

    def restart(self) -> None:
        """Start from scratch."""
        self.step, self.poisoned = 0, False

    def numbered(self) -> list[str]:
        """The paths with numbers that lie there, oldest first."""
        return sorted((path for path in self.disk.all() if numbers(path)), key=numbers)


def numbers(path: str) -> tuple[int, ...]:
    """All numbers of a name."""
    return tuple(map(int, re.findall(r"\d+", path)))


def is_of(manifest: Manifest, content: Content) -> bool:
    """Whether these are the bytes that a manifest names."""
    files = dict(content)
    for file in manifest.files:
        data = rest = files.get(file.path.removeprefix(manifest.path).lstrip("/"), b"")
        if len(data) != file.size:
            return False
        for span in reversed(file.spans):
            end = span.offset + span.length
            if blake3(data[span.offset : end]).hexdigest() != span.blake3:
                return False
            rest = rest[: span.offset] + rest[end:]
        if blake3(rest).hexdigest() != file.envelope:
            return False
    return True
