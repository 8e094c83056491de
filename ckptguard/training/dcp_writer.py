"""torch.distributed.checkpoint's own planner and writer: what each rank writes, hashed while it is written."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from blake3 import blake3
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from ckptguard.training.host_copy import HostCopy


class Planned:
    """What this rank is to write of a state whose tensors lie on several: the steps of torch's own `save`, one by one,
    so that time may pass between them. Made by all ranks of the group at once; torch raises what went wrong on any."""

    def __init__(self, live: dict[str, Any], writer: FileSystemWriter, group: Any) -> None:
        self._writer = writer
        self._planner = _Planner()
        self._metadata: Metadata | None = None  # rank 0 has it
        ranks = _DistWrapper(group, True, 0)

        def local() -> SavePlan:
            self._planner.set_up_planner(live, writer.storage_meta(), ranks.is_coordinator)
            writer.set_up_storage_writer(ranks.is_coordinator)
            return writer.prepare_local_plan(self._planner.create_local_plan())

        def of_all(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = self._planner.create_global_plan(plans)
            return writer.prepare_global_plan(plans)

        self._plan = self._planner.finish_plan(ranks.reduce_scatter("plan", local, of_all))

    def copy_into(self, host: HostCopy) -> None:
        """Write copies of the tensors as they are now. MemoryError if there is no room."""
        resolved = {item.index: self._planner.resolve_data(item) for item in self._plan.items}
        plain = {index: value for index, value in resolved.items() if _is_plain(value)}
        others = {
            index: value.detach().clone().cpu() if isinstance(value, torch.Tensor) else value
            for index, value in resolved.items()
            if index not in plain
        }
        self._planner.copies = {**others, **host.take_tensors(plain)}
        self._planner.state_dict = {}

    def copied_floats(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The copied tensors that can hold NaN, except settings of the optimizer, by the names that all ranks share."""
        for index, value in self._planner.copies.items():
            is_float = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if is_float and value.numel() and not index.fqn.startswith("optimizer.param_groups."):
                yield index.fqn, value

    def write(self, go_on: Callable[[], None]) -> list[WriteResult]:
        """Write this rank's file. `go_on` is called before each tensor; what it raises ends the writing."""
        self._planner.go_on = go_on
        return self._writer.write_data(self._plan, self._planner).value()

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Rank 0, once all have written: write what says where everything lies."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, results)


class _Planner(DefaultSavePlanner):
    """Hands out the copies of what it would hand out live."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[MetadataIndex, Any] = {}
        self.go_on: Callable[[], None] = lambda: None

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.go_on()
        if write_item.index in self.copies:
            return self.copies[write_item.index]
        return super().resolve_data(write_item)


def in_words(result: WriteResult) -> list[Any]:
    """Where a tensor was written, as JSON values."""
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, place.relative_path, place.offset, place.length]


def from_words(words: Sequence[Any]) -> WriteResult:
    """What another rank put `in_words`."""
    name, offset, index, size, *place = words
    return WriteResult(MetadataIndex(name, offset, index), size, _StorageInfo(*place))


def _is_plain(value: Any) -> bool:
    """Whether a tensor's elements lie in memory one by one."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized
    )


class HashingWriter(FileSystemWriter):
    """Writes one file for this rank. Afterwards `digests` has the BLAKE3 of each file this rank wrote, by name."""

    def __init__(self, path: str) -> None:
        super().__init__(path, sync_files=True, overwrite=False)
        self.digests: dict[str, str] = {}
        self.fs = _HashingFileSystem(self.digests)


class _HashingFileSystem(FileSystem):
    def __init__(self, digests: dict[str, str]) -> None:
        self._digests = digests

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            yield cast(io.IOBase, hashing)
            self._digests[os.path.basename(path)] = hashing.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._digests[os.path.basename(new_path)] = self._digests.pop(os.path.basename(path))


class _HashingStream:
    """A file that is only ever written to its end. Seeking is refused: the digest would be that of other bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hasher = blake3()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):
            written += self._stream.write(view[written:])
        self._hasher.update(view)
        return written

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()

    def tell(self) -> int:
        return int(self._stream.tell())

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self._stream.close()
