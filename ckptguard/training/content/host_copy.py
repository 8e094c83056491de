"""A copy of training's tensors in host memory, which the next copy reuses."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

from ckptguard.training.content.tensor_bytes import (
    byte_size,
    dtype_word,
    is_writable_in_place,
    place_of,
    threads_for_memory,
)
from ckptguard.training.content.training_parts import Captured

Name = TypeVar("Name", bound=Hashable)

_ALIGNMENT = 64
_PIECE = 32 * 1024**2  # bytes that one thread copies at a time


class HostCopy:
    """Holds one copy at a time: the next one overwrites the last. With a device, its memory is pinned.

    Forked processes do not share this memory, and do not pay for it.
    """

    def __init__(self) -> None:
        self._memory: Any = None  # a byte tensor
        self._owner = os.getpid()

    def take(self, captured: Captured) -> Captured:
        """Return a copy of the state that later training does not change. Everything is copied on return.

        Raises:
            StateError: a tensor cannot be stored.
            MemoryError: there is no memory for a copy.
        """
        parts = {"model": captured.model, "others": captured.others}
        tensors = {(part, name): tensor for part, named in parts.items() for name, tensor in named.items()}
        for (_, name), tensor in tensors.items():
            dtype_word(tensor, name)
        copies = self.take_tensors(tensors)
        model, others = ({name: copies[part, name] for name in named} for part, named in parts.items())
        return replace(captured, model=model, others=others)

    def take_tensors(self, tensors: Mapping[Name, Any]) -> dict[Name, Any]:
        """Do the same for strided tensors by name. Each copy has a storage of exactly its size. Tensors that share all
        their memory share one copy."""
        import torch

        distinct = {place_of(tensor): tensor for tensor in tensors.values()}
        sizes = [-(-byte_size(tensor) // _ALIGNMENT) * _ALIGNMENT for tensor in distinct.values()]
        pinned = any(tensor.device.type != "cpu" for tensor in distinct.values())
        memory = self._room_for(sum(sizes), pinned=pinned).untyped_storage()
        copies: dict[tuple[object, ...], Any] = {}
        with torch.no_grad():
            for (place, tensor), begin in zip(distinct.items(), accumulate(sizes, initial=0), strict=False):
                copy: Any = torch.empty(0, dtype=tensor.dtype)
                copies[place] = copy.set_(memory[begin : begin + byte_size(tensor)], 0, tensor.shape)
            _copy_all((copies[place], tensor.detach()) for place, tensor in distinct.items())
        return {name: copies[place_of(tensor)] for name, tensor in tensors.items()}

    def _room_for(self, size: int, *, pinned: bool) -> Any:
        if self._owner != os.getpid():
            self._memory, self._owner = None, os.getpid()  # forked: the parent's memory is not here
        memory = self._memory
        if memory is None or memory.numel() < size or (pinned and not memory.is_pinned()):
            self._memory = memory = None  # first free the old one, so that there are never two
            self._memory = memory = _allocated(max(size, 1), pinned=pinned)
        return memory


def _allocated(size: int, *, pinned: bool) -> Any:
    import torch

    if pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            pass  # no device that needs it, or more memory than may be locked
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for a copy of the state ({size} bytes)") from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(OSError, AttributeError):  # only faster with it
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


def _copy_all(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Copy each second tensor into the first. Complete on return."""
    import torch

    pieces: list[tuple[int, int, int]] = []
    can_wait = hasattr(torch, "accelerator")  # otherwise each copy waits for its device itself
    devices = set()
    for target, source in pairs:
        if is_writable_in_place(source):
            size = byte_size(source)
            starts = range(0, size, _PIECE)
            pieces += [(target.data_ptr() + n, source.data_ptr() + n, min(_PIECE, size - n)) for n in starts]
        else:
            target.copy_(source, non_blocking=can_wait)
            devices.add(source.device)
    threads = threads_for_memory()
    if sum(size for *_, size in pieces) > 4 * _PIECE and threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda piece: ctypes.memmove(*piece), pieces))
    else:
        for piece in pieces:
            ctypes.memmove(*piece)
    for device in devices:
        if can_wait and device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()
