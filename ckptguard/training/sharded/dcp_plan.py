"""What each rank writes of a distributed state: torch's own plan, executed by torch's own writer, with a digest of
every byte written."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from blake3 import blake3
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

from ckptguard.training.content.host_copy import HostCopy
from ckptguard.training.ranks import Ranks

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass
class LastPlan:
    """The plan of the last save. It is reused if no rank's state has changed its form: planning takes longer than
    copying a small state."""

    form: object = None
    plan: SavePlan | None = None
    metadata: Metadata | None = None  # only on rank 0


class Planned:
    """What this rank must write: the steps of torch's own `save`, one by one, so that time may pass between them.

    All ranks create it at once. If one fails, torch raises on all.
    """

    def __init__(self, live: dict[str, Any], writer: FileSystemWriter, ranks: Ranks, last: LastPlan) -> None:
        self._writer = writer
        self._planner = _Planner()
        self._planner.set_up_planner(live, writer.storage_meta(), ranks.rank == 0)
        writer.set_up_storage_writer(ranks.rank == 0)
        form = _form(live)
        if ranks.any(last.plan is None or last.form != form):
            last.plan = None

            def of_all(plans: list[SavePlan]) -> list[SavePlan]:
                plans, last.metadata = self._planner.create_global_plan(plans)
                return writer.prepare_global_plan(plans)

            exchange = _DistWrapper(ranks.group, ranks.size > 1, 0)
            last.plan = exchange.reduce_scatter("plan", self._planner.create_local_plan, of_all)
            last.form = form
        assert last.plan is not None
        self._plan = self._planner.finish_plan(last.plan)
        self._metadata = last.metadata

    @property
    def bytes(self) -> int:
        """About how many bytes this rank writes."""
        return sum(item.tensor_storage_size() or 0 for item in self._plan.items)

    def copy_into(self, host: HostCopy) -> None:
        """Use copies of the current tensors from now on. Raises MemoryError."""
        plain, others = {}, {}
        for item in self._plan.items:
            value = self._planner.resolve_data(item)
            if not isinstance(value, torch.Tensor):
                others[item.index] = value
            elif type(value) in _PLAIN and value.layout is torch.strided and not value.is_quantized:
                plain[item.index] = value  # its elements are in memory one by one
            else:
                others[item.index] = value.detach().clone().cpu()
        self._planner.copies = {**others, **host.take_tensors(plain)}
        self._planner.state_dict = {}
        self._writer.per_thread_copy_ahead = 0  # otherwise the writing thread would use the first device

    def copied_floats(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the copied tensors that can hold NaN, except settings of the optimizer, by the names that all ranks
        share."""
        for index, value in self._planner.copies.items():
            is_float = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if is_float and value.numel() and not index.fqn.startswith("optimizer.param_groups."):
                yield index.fqn, value

    def write(self, check_stop: Callable[[], None]) -> list[WriteResult]:
        """Write this rank's file. `check_stop` is called before each tensor; an exception from it ends the writing."""
        self._planner.check_stop = check_stop
        return self._writer.write_data(self._writer.prepare_local_plan(self._plan), self._planner).value()

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Rank 0, after all have written: write the index of all files."""
        assert self._metadata is not None
        self._writer.finish(dataclasses.replace(self._metadata), results)


class _Planner(DefaultSavePlanner):
    """Returns copies instead of live values."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[MetadataIndex, Any] = {}
        self.check_stop: Callable[[], None] = lambda: None

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.check_stop()
        if write_item.index in self.copies:
            return self.copies[write_item.index]
        return super().resolve_data(write_item)


class HashingWriter(FileSystemWriter):
    """Writes one file for this rank. Then `digests` has the BLAKE3 of each written file, by name."""

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
            try:
                yield cast(io.IOBase, hashing)
            except Exception as error:
                raise hashing.failure or error from error  # torch would only say where it stopped
            self._digests[os.path.basename(path)] = hashing.hasher.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._digests[os.path.basename(new_path)] = self._digests.pop(os.path.basename(path))


class _HashingStream:
    """A file that is only appended to. Seeking is refused, because the digest would be wrong."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.tell, self.flush, self.fileno, self.close = stream.tell, stream.flush, stream.fileno, stream.close
        self.hasher = blake3()
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                written += self._stream.write(view[written:])
        except OSError as error:
            self.failure = error
            raise
        self.hasher.update(view)
        return written

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def in_words(result: WriteResult) -> list[Any]:
    """Return where a tensor was written, as JSON values."""
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, place.relative_path, place.offset, place.length]


def from_words(words: Sequence[Any]) -> WriteResult:
    """Invert `in_words` for another rank's result."""
    name, offset, index, size, *place = words
    return WriteResult(MetadataIndex(name, offset, index), size, _StorageInfo(*place))


def _form(value: Any) -> object:
    """Return what a plan depends on: equal for states with the same plan."""
    if isinstance(value, Mapping):
        return {key: _form(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_form(entry) for entry in value]
    if not isinstance(value, torch.Tensor):
        return type(value)
    form = (value.shape, value.dtype, value.layout, value.requires_grad)
    if type(value) in (*_PLAIN, torch.nn.Buffer):
        return form
    if type(value) is DTensor:
        return (*form, value.to_local().shape, value.placements, value.device_mesh)
    return object()  # another kind: equal to nothing
