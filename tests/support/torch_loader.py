"""torch.load in a process of its own, with bounds on memory and on the processor's time: other load counts not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import msgspec

MEMORY = 8 << 30
SECONDS = 20

_WORKER = """
import collections, json, math, resource, sys, time, warnings
import numpy as np, torch
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def bad_tensor(t, waiting):
    waiting += list(getattr(t, "__dict__", {}).values()) + [t._backward_hooks]
    if t.is_meta:
        return t.numel() > 0
    if t.layout is not torch.strided:
        t = t._values() if t.layout is torch.sparse_coo else t.values()
    if t.is_nested:
        t = t.values()
    if t.is_quantized:
        try:
            t = t.dequantize()
        except RuntimeError:
            return False  # bare integers, without a scale
    if not t.numel():
        return False
    if t.untyped_storage().nbytes() < t.numel():
        t = torch.as_strided(t, [1 if not s else n for n, s in zip(t.shape, t.stride())], t.stride())
    return bool(not torch.isfinite(t.double() if not t.is_complex() else t).all())

def all_finite(value):
    waiting, seen = [value], set()
    while waiting:
        v = waiting.pop()
        if isinstance(v, (float, complex)) or isinstance(v, np.generic):
            if isinstance(v, (float, complex, np.inexact)) and not np.isfinite(v):
                return False
            continue
        if id(v) in seen or isinstance(v, (str, bytes, int, type)) or v is None:
            continue
        seen.add(id(v))
        kept.append(v)
        if isinstance(v, torch.Tensor):
            if bad_tensor(v, waiting):
                return False
            continue
        if isinstance(v, (torch.UntypedStorage, torch.TypedStorage)):
            if isinstance(v, torch.TypedStorage) and v.dtype.is_floating_point and v.device.type != "meta":
                waiting.append(torch.empty(0, dtype=v.dtype).set_(v._untyped_storage))
            continue
        if isinstance(v, np.ndarray):
            waiting += v.ravel().tolist()
            continue
        if isinstance(v, dict):
            waiting += list(v) + list(v.values())
        elif isinstance(v, (list, tuple, set, frozenset, collections.deque)):
            waiting += list(v)
        waiting += list(getattr(v, "__dict__", {}).values())
    return True

for line in sys.stdin:
    path = json.loads(line)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + int(sys.argv[2]) + 1, resource.RLIM_INFINITY))
    answer = {"loads": False, "finite": True, "why": ""}
    for options in ({"weights_only": True}, {"weights_only": False}, {"weights_only": False, "encoding": "latin1"}):
        kept = []
        try:
            loaded = torch.load(path, **options)
        except BaseException as error:
            answer["why"] += f"{options}: {type(error).__name__}: {error}"[:300] + "; "
            continue
        try:
            answer = {"loads": True, "finite": all_finite(loaded), "why": repr(options)}
        except BaseException as error:
            answer = {"loads": True, "finite": True, "why": f"not looked at: {error!r}"}
        loaded = None
        break
    print(json.dumps(answer), flush=True)
"""


class Loaded(msgspec.Struct, frozen=True):
    """Whether torch.load loads a file, and whether all numbers in what it yields are finite."""

    loads: bool
    finite: bool
    why: str


class TorchLoader:
    """Loads one file after the other; a process that dies or takes too long is replaced, and its file loads not."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> TorchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def load(self, path: Path) -> Loaded:
        """What torch.load makes of this file."""
        if self._process is None:
            command = [sys.executable, "-c", _WORKER, str(MEMORY), str(SECONDS)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(str(path)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._end()
            return Loaded(loads=False, finite=True, why="it died, or took too long")
        return msgspec.json.decode(line, type=Loaded)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
