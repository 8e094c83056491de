"""safetensors files of torch tensors: hashed from memory while written, verified while loaded.

The order of names is fixed: the largest elements first, so that all are aligned. A tensor with several names is stored
once. The header's metadata maps its other names to the stored one. `FileStream` writes these and other local files past
the page cache, while the caller prepares the next block.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from ckptguard.errors import CouldNotTellError, SickTrainingError, StateError
from ckptguard.formats.dtypes import WITH_FLOATS
from ckptguard.scan.file_tallies import Tallies
from ckptguard.scan.result import Numbers
from ckptguard.scan.tallies import Tally, merge
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Reader
from ckptguard.training.content.tensor_bytes import (
    byte_size,
    copy_bytes,
    dtype_word,
    in_memory,
    is_finite,
    is_writable_in_place,
    place_of,
    threads_for_memory,
    view_of,
)
from ckptguard.values.manifest import File, Span, Tensor

BLOCK = 1024**2  # bytes that stay in a processor's cache between two uses
_WRITTEN = 4 * 1024**2  # bytes per write
_SAMPLED = 64 * 1024**2  # bytes whose sample is taken at once
_BLOCKS = 3  # one is filled, one is written, one waits
_NOT_ALIASES = ("format", "unread")


class NotAsSealed(StateError):
    """The bytes of a checkpoint differ from the sealed ones, or hold forbidden NaN or infinity."""


class FilePlan(NamedTuple):
    """The stored names in file order, and the header for them."""

    names: tuple[str, ...]
    aliases: dict[str, str]
    header: bytes


def plan_file(tensors: Mapping[str, Any]) -> FilePlan:
    """Lay out a file without reading elements. Raises StateError for a tensor that cannot be stored."""
    words = {name: dtype_word(tensor, name) for name, tensor in tensors.items()}
    kept: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name == "__metadata__" or name in _NOT_ALIASES:
            raise StateError(f'a tensor cannot be stored under the name "{name}"')
        stored = kept.setdefault(place_of(tensor), name)
        if stored != name:
            aliases[name] = stored
    names = sorted((n for n in tensors if n not in aliases), key=lambda n: (-tensors[n].element_size(), n))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **dict(sorted(aliases.items()))}}
    end = 0
    for name in names:
        begin, end = end, end + byte_size(tensors[name])
        entries[name] = {"dtype": words[name], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return FilePlan(names=tuple(names), aliases=aliases, header=len(text).to_bytes(8, "little") + text)


class OutputStream(Protocol):
    """Receives a file's bytes in order."""

    def write(self, data: memoryview) -> None:
        """Append bytes. They may change afterwards."""


def write_tensors(
    stream: OutputStream,
    tensors: Mapping[str, Any],
    *,
    key: str,
    role: str,
    check_stop: Callable[[], None] = lambda: None,
    sick: Callable[[str, Any], bool] = lambda *_: False,
) -> File:
    """Write a file into a stream and hash it. Its final key in the run will be `key`.

    `check_stop` is called between blocks; an exception from it ends the writing. `sick(name, tensor)` is called for
    each tensor with NaN or infinity. If it returns True, SickTrainingError ends the writing.
    """
    from blake3 import blake3

    plan = plan_file(tensors)
    dtypes = {name: str(tensors[name].dtype).removeprefix("torch.") for name in plan.names}
    tallies = Tallies(sum(byte_size(tensors[name]) for name, dtype in dtypes.items() if dtype in WITH_FLOATS))
    spans: list[Span] = []
    written: list[tuple[str, str, tuple[int, ...], int | None, str]] = []
    numbers: dict[int, Numbers] = {}
    large: dict[int, Tally] = {}
    small: dict[int, Any] = {}  # tensors that are looked at together
    position = len(plan.header)
    stream.write(memoryview(plan.header))

    def check(place: int, first_bad: int | None, memory: Any) -> None:
        if first_bad is not None and sick(plan.names[place], memory):
            raise SickTrainingError(f"not saved: {plan.names[place]} holds NaN or infinity", known_good=None)

    def settle() -> None:
        numbers.update(found := tallies.settle())
        for place, one in found.items():
            check(place, one.first_bad, small[place])
        small.clear()

    for place, name in enumerate(plan.names):
        memory = in_memory(tensors[name])
        view = view_of(memory)
        number, tally = None, None
        if len(view):
            hasher = blake3()
            if dtypes[name] in WITH_FLOATS and not tallies.are_small(len(view)):
                tally = large[place] = tallies.tally(dtypes[name], "little")
            for start in range(0, len(view), BLOCK):
                check_stop()
                block = view[start : start + BLOCK]
                hasher.update(block)
                if tally is not None:
                    tally.look(block)
                stream.write(block)
            if tally is not None:
                for start in range(0, len(view), _SAMPLED):
                    tally.sample(view[start : start + _SAMPLED])
                tally.close()
                if tally.first_bad is not None:
                    settle()  # those before it
                check(place, tally.first_bad, memory)
            elif dtypes[name] in WITH_FLOATS:
                small[place] = memory
                if tallies.add_small(place, dtypes[name], "little", view):
                    settle()
            number = len(spans)
            spans.append(Span(position, len(view), hasher.hexdigest()))
            position += len(view)
        written.append((name, dtypes[name], tuple(memory.shape), number, role))
    settle()
    recorded = {place: one.recorded for place, one in numbers.items()}
    recorded |= {place: merge([tally]).recorded for place, tally in large.items()}
    return File(
        path=key,
        size=position,
        format="safetensors",
        envelope=blake3(plan.header).hexdigest(),
        spans=tuple(spans),
        tensors=tuple([Tensor(*what, *recorded.get(place, ())) for place, what in enumerate(written)]),
        aliases=tuple(sorted(plan.aliases)),
    )


def read_file(
    reader: Reader,
    sealed: File,
    into: Mapping[str, Any],
    *,
    sick: Callable[[str, Any], bool] = lambda *_: False,
    threads: int | None = None,
) -> dict[str, Any]:
    """Load a file and return all tensors by name, aliases too. Every loaded byte is hashed, every float checked.

    With one of `threads`, the file is read in order. Tensors named in `into` must fit, and are filled in place. Others
    are created on the CPU. `sick(name, tensor)` decides about each tensor with NaN or infinity.

    Raises:
        StateError: a tensor in `into` does not fit.
        NotAsSealed: the bytes are wrong. Tensors may be half loaded: load another checkpoint over them.
    """
    from blake3 import blake3

    size = reader.entry.size
    if size != sealed.size:
        raise NotAsSealed(f"{sealed.path} has {size} bytes instead of the {sealed.size} that were sealed")
    header = reader.read(0, sealed.spans[0].offset if sealed.spans else size)
    end = max((s.offset + s.length for s in sealed.spans), default=len(header))
    if end != size or blake3(header).hexdigest() != sealed.envelope:
        raise NotAsSealed(f"the header of {sealed.path} is not what was sealed")
    _check_fit(sealed, into)

    def load(tensor: Tensor) -> Any:
        value, finite = _load(reader, sealed, tensor, into.get(tensor.name))
        if not finite and sick(tensor.name, value):
            raise NotAsSealed(f"{tensor.name} in {sealed.path} holds NaN or infinity")
        return value

    with ThreadPoolExecutor(threads or threads_for_memory()) as pool:
        try:
            loaded = dict(zip((t.name for t in sealed.tensors), pool.map(load, sealed.tensors), strict=True))
        except NotAsSealed:
            pool.shutdown(cancel_futures=True)
            raise
    for alias, name in _aliases(header).items():
        target = into.get(alias)
        if target is not None and target.data_ptr() != loaded[name].data_ptr():
            target.copy_(loaded[name])
        loaded[alias] = loaded[name] if target is None else target
    reader.check_unchanged()
    return loaded


def _load(reader: Reader, sealed: File, tensor: Tensor, target: Any) -> tuple[Any, bool]:
    """Return the tensor, and whether its numbers are finite."""
    import torch
    from blake3 import blake3

    memory = target
    if target is None or not is_writable_in_place(target):
        memory = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    view = view_of(memory)
    span = sealed.spans[tensor.span] if tensor.span is not None else Span(0, 0, "")
    if len(view) != span.length:
        raise CouldNotTellError(f"the manifest gives {tensor.name} another size than its shape")
    hasher = blake3()
    finite = True
    for start in range(0, len(view), BLOCK):
        block = view[start : start + BLOCK]
        reader.read_into(span.offset + start, block)
        hasher.update(block)
        finite = finite and is_finite(block, tensor.dtype)
    if tensor.span is not None and hasher.hexdigest() != span.blake3:
        raise NotAsSealed(f"the bytes of {tensor.name} in {sealed.path} are not those that were sealed")
    if target is None or memory is target:
        return memory, finite
    return target.copy_(memory), finite


def fitting(sealed: File, into: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `into` that can take the file's tensor of their name.

    They have its type and shape and no gaps, and share no memory with each other.
    """
    shared = Counter(tensor.data_ptr() for tensor in into.values())
    found = {}
    for tensor in sealed.tensors:
        target = into.get(tensor.name)
        if target is None or _kind(target) != (tensor.dtype, tensor.shape) or shared[target.data_ptr()] > 1:
            continue
        if target.is_contiguous() and not target.is_conj() and not target.is_neg():
            found[tensor.name] = target
    return found


def _kind(tensor: Any) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _check_fit(sealed: File, into: Mapping[str, Any]) -> None:
    for tensor in sealed.tensors:
        target = into.get(tensor.name)
        if target is not None and (found := _kind(target)) != (tensor.dtype, tensor.shape):
            raise StateError(
                f"{tensor.name} was saved as {tensor.dtype} {list(tensor.shape)}; "
                f"here it is {found[0]} {list(found[1])}",
                hint="build the model as it was when it was saved",
            )


def _aliases(header: bytes) -> dict[str, str]:
    metadata = json.loads(header[8:]).get("__metadata__", {})
    return {alias: name for alias, name in metadata.items() if alias not in _NOT_ALIASES}


class FileStream:
    """Appends bytes to an empty file that the caller opened for writing. Always call `close`, also after a failure.

    Where possible it bypasses the page cache: durable writes would only evict what training reads. `write` and `finish`
    raise StorageFullError and the other storage errors.
    """

    def __init__(self, descriptor: int, *, key: str, where: str) -> None:
        self._descriptor, self._key, self._where = descriptor, key, where
        self._direct = _set_direct(descriptor, wanted=True)
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(_BLOCKS):
            self._free.put(mmap.mmap(-1, _WRITTEN))  # aligned to pages, as direct writes require
        self._full: SimpleQueue[tuple[mmap.mmap, int] | None] = SimpleQueue()
        self._block, self._filled = self._free.get(), 0
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._write_blocks, name="ckptguard-write", daemon=True)
        self._thread.start()

    def write(self, data: memoryview) -> None:
        """Append bytes. They may change afterwards."""
        while len(data):
            count = min(len(data), _WRITTEN - self._filled)
            copy_bytes(memoryview(self._block)[self._filled : self._filled + count], data[:count])
            self._filled += count
            data = data[count:]
            if self._filled == _WRITTEN:
                self._hand_over()
                self._block = self._free.get()
                self._raise_failure()

    def finish(self) -> None:
        """Return once everything is on the disk."""
        self._hand_over()
        self.close()
        self._raise_failure()
        with translated(self._key, self._where):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """End the thread. The descriptor stays the caller's."""
        if not self._closed:
            self._closed = True
            self._full.put(None)
            self._thread.join()

    def _hand_over(self) -> None:
        self._full.put((self._block, self._filled))
        self._filled = 0

    def _raise_failure(self) -> None:
        if self._failure is not None:
            with translated(self._key, self._where):
                raise self._failure

    def _write_blocks(self) -> None:
        while (given := self._full.get()) is not None:
            block, length = given
            if self._failure is None:
                try:
                    self._write(memoryview(block)[:length])
                except BaseException as error:
                    self._failure = error
            self._free.put(block)

    def _write(self, left: memoryview) -> None:
        if len(left) < _WRITTEN:
            self._direct = self._direct and not _set_direct(self._descriptor, wanted=False)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError as error:
                # A file system may need another alignment, or write a part of a block: continue through the page cache.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = False
                _set_direct(self._descriptor, wanted=False)


def _set_direct(descriptor: int, *, wanted: bool) -> bool:
    """Switch direct writing on or off. Returns whether that was done."""
    flag = getattr(os, "O_DIRECT", 0)
    if flag:
        import fcntl

        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
            return True
    return False
