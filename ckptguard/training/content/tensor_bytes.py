"""The bytes of torch tensors in memory, and the safetensors names of their types."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from ckptguard.errors import StateError
from ckptguard.formats.dtypes import DTYPES, SAFETENSORS_DTYPES

_WORDS = {name: word for word, (name, bits) in SAFETENSORS_DTYPES.items() if bits % 8 == 0}

_SMALL = 64 * 1024  # bytes, below which a plain copy is faster
_THREADS = 8  # more threads do not read and write memory faster


def threads_for_memory() -> int:
    """Return how many threads to use for work that only moves bytes through memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_THREADS, cores)


def dtype_word(tensor: Any, path: str) -> str:
    """Return the safetensors word for a tensor's type. StateError names the path of a tensor that cannot be stored."""
    import torch

    buffer = getattr(torch.nn, "Buffer", None)  # since torch 2.5
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, buffer)
    word = _WORDS.get(str(tensor.dtype).removeprefix("torch."))
    if not plain or word is None or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        what = str(tensor.dtype) if plain and word is None else f"{type(tensor).__name__} ({tensor.layout})"
        raise StateError(
            f"{path} is a tensor that safetensors cannot hold: {what}", hint="save with your own save= and load="
        )
    return word


def byte_size(tensor: Any) -> int:
    """Return the bytes of a tensor's elements, stored without gaps."""
    return int(tensor.numel() * tensor.element_size())


def place_of(tensor: Any) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same memory and the same reading of it."""
    own = id(tensor) if not byte_size(tensor) else tensor.data_ptr()
    return (tensor.device, own, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())


def stored_size(tensors: Mapping[str, Any]) -> int:
    """Return the bytes of some tensors in a file that stores each once, whatever its number of names."""
    return sum(map(byte_size, {place_of(tensor): tensor for tensor in tensors.values()}.values()))


def in_memory(tensor: Any) -> Any:
    """Return the same elements on the CPU, without gaps; if possible the tensor itself."""
    if is_writable_in_place(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def is_writable_in_place(tensor: Any) -> bool:
    """True if bytes written through `view_of` arrive in this tensor."""
    return bool(tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def is_finite(block: memoryview, dtype: str) -> bool:
    """True if whole elements of a torch type hold neither NaN nor infinity. Exact; True for types without them."""
    import numpy

    layout = DTYPES[dtype].float
    if layout is None or not len(block):
        return True
    # Without the sign, bits order like magnitudes. Two extremes need no temporary, and a cached block is read twice
    # cheaply.
    bits = numpy.frombuffer(block, f"<u{layout.size}")
    highest = int(bits.max())
    if not layout.signed:
        return highest < layout.bad
    positive = int(bits.view(f"<i{layout.size}").max())
    negative = highest ^ layout.sign if highest & layout.sign else 0
    if layout.negative_zero_is_nan and highest & layout.sign:
        return positive < layout.bad and bool((bits != layout.sign).all())
    return max(positive, negative) < layout.bad


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between two buffers of the same length, without blocking other threads."""
    if len(source) < _SMALL:
        target[:] = source
        return
    length = len(source)
    if len(target) != length:
        raise ValueError("the buffers differ in length")
    array = ctypes.c_ubyte * length
    ctypes.memmove(array.from_buffer(target), bytes(source) if source.readonly else array.from_buffer(source), length)


def view_of(tensor: Any) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable and not copied. The caller keeps the tensor alive."""
    size = byte_size(tensor)
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
