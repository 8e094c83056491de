"""What each rank writes of a state that lies on several: torch's own plan, carried out step by step by torch's own
writer, with a digest of every byte taken while it is written."""

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
from ckptguard.training.ranks import GlooRanks

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass
class LastPlan:
    """The plan of the last save. It is that of the next one too if no rank's state has another form by then; to make
    one takes longer than to copy a small state."""

    form: object = None
    plan: SavePlan | None = None
    metadata: Metadata | None = None  # rank 0 has it


class Planned:
    """What this rank is to write: the steps of torch's own `save`, one by one, so that time may pass between them.
    Made by all ranks at once; torch raises on all what went wrong on any."""

    def __init__(self, live: dict[str, Any], writer: FileSystemWriter, ranks: GlooRanks, last: LastPlan) -> None:
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

            exchange = _DistWrapper(ranks.group, True, 0)
            last.plan = exchange.reduce_scatter("plan", self._planner.create_local_plan, of_all)
            last.form = form
        assert last.plan is not None
        self._plan = self._planner.finish_plan(last.plan)
        self._metadata = last.metadata

    @property
    def bytes(self) -> int:
        """About how many this rank is to write."""
        return sum(item.tensor_storage_size() or 0 for item in self._plan.items)

    def copy_into(self, host: HostCopy) -> None:
        """Write copies of the tensors as they are now. MemoryError if there is no room."""
        plain, others = {}, {}
        for item in self._plan.items:
            value = self._planner.resolve_data(item)
            if not isinstance(value, torch.Tensor):
                others[item.index] = value
            elif type(value) in _PLAIN and value.layout is torch.strided and not value.is_quantized:
                plain[item.index] = value  # its elements lie in memory one by one
            else:
                others[item.index] = value.detach().clone().cpu()
        self._planner.copies = {**others, **host.take_tensors(plain)}
        self._planner.state_dict = {}
        self._writer.per_thread_copy_ahead = 0  # or the thread that writes would take hold of the first device

    def copied_floats(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The copied tensors that can hold NaN, except settings of the optimizer, by the names that all ranks share."""
        for index, value in self._planner.copies.items():
            is_float = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if is_float and value.numel() and not index.fqn.startswith("optimizer.param_groups."):
                yield index.fqn, value

    def write(self, check_stop: Callable[[], None]) -> list[WriteResult]:
        """Write this rank's file. `check_stop` is called before each tensor; what it raises ends the writing."""
        self._planner.check_stop = check_stop
        return self._writer.write_data(self._writer.prepare_local_plan(self._plan), self._planner).value()

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Rank 0, once all have written: write what says where everything lies."""
        assert self._metadata is not None
        self._writer.finish(dataclasses.replace(self._metadata), results)


class _Planner(DefaultSavePlanner):
    """Hands out the copies of what it would hand out live."""

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
            try:
                yield cast(io.IOBase, hashing)
            except Exception as error:
                raise hashing.failure or error from error  # torch would only say where it stopped
            self._digests[os.path.basename(path)] = hashing.hasher.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._digests[os.path.basename(new_path)] = self._digests.pop(os.path.basename(path))


class _HashingStream:
    """A file that is only ever written to its end. Seeking is refused: the digest would be that of other bytes."""

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
    """Where a tensor was written, as JSON values."""
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, place.relative_path, place.offset, place.length]


def from_words(words: Sequence[Any]) -> WriteResult:
    """What another rank put `in_words`."""
    name, offset, index, size, *place = words
    return WriteResult(MetadataIndex(name, offset, index), size, _StorageInfo(*place))


def _form(value: Any) -> object:
    """What a plan depends on: equal for states that are planned alike."""
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
    return object()  # of another kind: equal to nothing
