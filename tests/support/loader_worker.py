"""The formats' own loaders in a process that can do nothing else.

For each path on standard input it says what the loaders made of it. A mutant may name anything to call: an audit hook
refuses all but what loading needs, and limits on memory, time and files hold the rest. A mutant that ends its process
costs a fork, and one that hangs is ended by an alarm.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import pickle
import re
import resource
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

_SECONDS = 20  # for one mutant
_LOADS = 20_000  # after so many a fresh child goes on
_MEMORY = 4 << 30  # more than what is mapped already
_MOST_VALUES = 100_000
_MOST_ELEMENTS = 1 << 22
# Lists of folders are for torch.distributed.checkpoint; numpy parses its header with `compile`, and runs nothing.
_FINE = frozenset(
    (
        "pickle.find_class",
        "builtins.id",
        "object.__getattr__",
        "os.listdir",
        "os.scandir",
        "glob.glob",
        "compile",
        "sys._getframe",
    )
)


_ADVICE = re.compile(r"(?s)^.*WeightsUnpickler error:|(?:Please use `torch|Check the documentation).*$")


class Refused(BaseException):
    """Loading it would do something else."""


def load_torch(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "weights_only", lambda: torch.load(path, weights_only=True)
    yield "plain", lambda: torch.load(path, weights_only=False)


def load_pickle(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "pickle", lambda: pickle.loads(path.read_bytes())


def load_safetensors(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "safetensors", lambda: safetensors.torch.load_file(path)


def load_numpy(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    def load(*, pickles: bool) -> object:
        found = np.load(path, allow_pickle=pickles)
        return {name: found[name] for name in found.files} if hasattr(found, "files") else found

    yield "no_pickle", lambda: load(pickles=False)
    yield "plain", lambda: load(pickles=True)


def load_dcp(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    def load() -> object:
        state: dict[str, Any] = {}
        reader = dcp.FileSystemReader(path)
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return state

    yield "dcp", load


def load_sharded(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    def load() -> object:
        index = json.loads((path / "model.safetensors.index.json").read_bytes())["weight_map"]
        shards = {shard: safetensors.torch.load_file(path / shard) for shard in sorted(set(index.values()))}
        return {name: shards[shard][name] for name, shard in index.items()}

    yield "safetensors", load


LOADERS = {
    "torch": load_torch,
    "pickle": load_pickle,
    "safetensors": load_safetensors,
    "numpy": load_numpy,
    "dcp": load_dcp,
    "sharded": load_sharded,
}


class Contents:
    """What a loaded value yields: its tensors, and the names of all that is not finite."""

    def __init__(self, value: object) -> None:
        self.tensors: list[tuple[str, str, list[int], str | None]] = []
        self.bad: list[str] = []
        self._seen: set[int] = set()
        self._kept: list[object] = []  # an id is one object's only while it lives
        waiting = [("", value)]
        for _ in range(_MOST_VALUES):
            if not waiting:
                return
            waiting += self._look(*waiting.pop())

    def _look(self, name: str, value: object) -> Iterator[tuple[str, object]]:
        if isinstance(value, float | complex | np.number) and not isinstance(value, np.integer):
            if not np.isfinite(value):
                self.bad.append(name)
            return
        if isinstance(value, str | bytes | int | type | None) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        prefix = f"{name}." if name else ""
        if isinstance(value, torch.Tensor):
            self._tensor(name or "value", value)
        elif isinstance(value, np.ndarray):
            yield from self._array(name or "value", value)
        elif isinstance(value, torch.storage.TypedStorage):
            self._tensor(name or "value", torch.tensor(value, dtype=value.dtype))
        elif isinstance(value, dict):
            yield from ((f"{prefix}{key}", item) for key, item in value.items())
            yield from ((f"{prefix}key", key) for key in value)
        elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
            yield from ((f"{prefix}{index}", item) for index, item in enumerate(value))
        with contextlib.suppress(Exception):
            yield from ((f"{prefix}{key}", item) for key, item in vars(value).items())

    def _tensor(self, name: str, value: torch.Tensor) -> None:
        value = value.detach()
        if value.is_quantized:
            return self._tensor(name, value.dequantize())
        if value.layout is not torch.strided:
            parts = ("_indices", "_values") if value.layout is torch.sparse_coo else ()
            for part in parts or ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values"):
                with contextlib.suppress(RuntimeError):
                    self._tensor(f"{name}.{part.lstrip('_')}", getattr(value, part)())
            return None
        if value.device.type == "meta" or value.numel() > _MOST_ELEMENTS:
            self.tensors.append((name, str(value.dtype)[6:], list(value.shape), None))
            return None
        value = value.resolve_conj().resolve_neg()
        flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.reshape(-1))  # it may have any strides
        raw = flat.view(torch.uint8).numpy().tobytes()
        self.tensors.append((name, str(value.dtype)[6:], list(value.shape), hashlib.sha256(raw).hexdigest()))
        floats = value.is_floating_point() or value.is_complex()
        if (
            floats
            and not (torch.view_as_real(value) if value.is_complex() else value).to(torch.float64).isfinite().all()
        ):
            self.bad.append(name)
        return None

    def _array(self, name: str, value: np.ndarray) -> Iterator[tuple[str, object]]:
        if value.dtype.hasobject:
            yield from ((f"{name}.{index}", item) for index, item in enumerate(value.ravel().tolist()))
        elif value.dtype.names:
            for field in value.dtype.names:
                inner = Contents(value[field])
                self.bad += [f"{name}.{field}"] * bool(inner.bad)
        else:
            if value.dtype.kind in "fc" and value.size <= _MOST_ELEMENTS and not np.isfinite(value).all():
                self.bad.append(name)
            kept = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False))
            digest = hashlib.sha256(kept.tobytes()).hexdigest() if value.size <= _MOST_ELEMENTS else None
            self.tensors.append((name, f"numpy.{value.dtype.newbyteorder('=').name}", list(value.shape), digest))


def load_all(path: str) -> list[dict[str, object]]:
    """What each loader of a kind makes of what lies there; the kind is the name of the folder that it lies in."""
    place, answers = Path(path), []
    for name, load in LOADERS[place.parent.name](place):
        answer: dict[str, object] = {"loader": name}
        try:
            found = Contents(load())
            answer |= {"tensors": found.tensors, "bad": found.bad[:20]}
        except Refused as error:
            answer |= {"refused": str(error)[:300]}
        except BaseException as error:
            answer |= {"error": f"{type(error).__name__}: {_ADVICE.sub('', str(error)).strip()}"[:400]}
        answers.append(answer)
    return answers


def forbid_all_but_reading(folder: str) -> None:
    """From now on nothing is imported, run, sent or written, and nothing outside of `folder` is opened."""

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event in _FINE or (event == "open" and str(args[0]).startswith(folder) and not _writes(args)):
            return
        raise Refused(f"{event} {args!r:.200}")

    sys.addaudithook(hook)


def _writes(args: tuple[object, ...]) -> bool:
    flags = args[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def serve(folder: str) -> None:
    """Answer paths, one a line, in children."""
    given, told = sys.stdin.buffer.raw, sys.stdout.buffer.raw  # type: ignore[attr-defined]
    while True:
        child = os.fork()
        if not child:
            os._exit(_answer(given, told, folder))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 1:
            return
        if status:
            _send(told, [{"loader": "process", "error": f"it ended with {status}"}])


def _answer(given: io.RawIOBase, told: io.RawIOBase, folder: str) -> int:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for limit, most in (
        (resource.RLIMIT_AS, mapped + _MEMORY),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, 3600),
    ):
        resource.setrlimit(limit, (most, most))
    dumps, alarm = json.JSONEncoder(default=str).encode, signal.alarm
    forbid_all_but_reading(folder)
    for _ in range(_LOADS):
        line = b""
        while not line.endswith(b"\n"):
            byte = given.read(1)
            if not byte:
                return 1
            line += byte
        alarm(_SECONDS)
        found = load_all(line.decode().rstrip("\n"))
        alarm(0)
        _send(told, found, dumps)
    return 0


def _send(told: io.RawIOBase, answers: object, dumps: Callable[[object], str] = json.dumps) -> None:
    body = dumps(answers).encode()
    body = struct.pack("<I", len(body)) + body
    while body:
        body = body[told.write(body) or 0 :]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for _kind in sorted(os.listdir(sys.argv[1])):  # all that is imported late is imported now
        for _place in sorted(Path(sys.argv[1], _kind).iterdir()):
            for _found in load_all(str(_place)):
                assert math.isfinite(len(_found.get("tensors", ()))), _found
    serve(sys.argv[2])
