"""The interface of plugins: one function for each kind, and the values that it takes and returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Literal, Protocol

import msgspec

INTERFACE = 1  # raised with any change that an existing plugin would notice
KINDS = ("formats", "checks", "channels", "layouts")  # each is the entry-point group `ckptguard.<kind>`


class StoredTensor(msgspec.Struct, frozen=True):
    """Where one tensor is in a file: its elements are stored there in row-major order, uncompressed, from byte
    `offset` on. `dtype` is torch's name without the prefix: "float32", "bfloat16", "int64"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    byte_order: Literal["little", "big"] = "little"


class FileContents(msgspec.Struct, frozen=True):
    """What a file holds.

    - `tensors`: every tensor. Nearly every byte must be in one. Other large content is a tensor of "uint8".
    - `problems`: what is wrong with the file, each in one sentence. It makes the file bad.
    - `truncated`: the file ends too early, and may still be being written.
    - `not_understood`: parts that hold state and that this plugin cannot read.
    """

    tensors: tuple[StoredTensor, ...] = ()
    problems: tuple[str, ...] = ()
    truncated: bool = False
    not_understood: tuple[str, ...] = ()


class SavedTensor(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint, with what our scan measured. `role` is "model", "optimizer", "ema" or another one.

    `largest` is the largest finite magnitude, `rms` the root mean square and `zeros` the share of zeros. They are None
    for types other than floats. `nonfinite` counts NaN and infinities; None for a tensor of an earlier save.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    largest: float | None = None
    rms: float | None = None
    zeros: float | None = None
    nonfinite: int | None = None


class Saved(msgspec.Struct, frozen=True):
    """A checkpoint in which our own checks found no error. `previous` are the tensors of the save before it."""

    path: str
    step: int | tuple[int, ...] | None
    tensors: tuple[SavedTensor, ...]
    previous: tuple[SavedTensor, ...] = ()


class Remark(msgspec.Struct, frozen=True):
    """What a check says, in one sentence. An "error" makes the checkpoint bad, and a "sickness" suspect."""

    message: str
    severity: Literal["error", "sickness", "warning", "notice"] = "sickness"
    file: str | None = None
    tensor: str | None = None


class FoundCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that a layout found: its path, and its `files`, by their paths in the run.

    `missing` are files without which it is not complete.
    """

    path: str
    files: tuple[str, ...]
    missing: tuple[str, ...] = ()


class FormatPlugin(Protocol):
    """Reads files whose names end in "." and the name of the entry point."""

    def __call__(self, file: BinaryIO, /) -> FileContents: ...


class CheckPlugin(Protocol):
    """Judges a checkpoint of a run whose setting `checks` names it."""

    def __call__(self, saved: Saved, /) -> Iterable[Remark]: ...


class ChannelPlugin(Protocol):
    """Delivers an event to an address ``plugin+NAME://...`` of the setting `notify`. It raises if that failed."""

    def __call__(self, address: str, event: Mapping[str, Any], /) -> None: ...


class LayoutPlugin(Protocol):
    """Finds checkpoints among files that ours do not know, in a run whose setting `layouts` names it."""

    def __call__(self, names: Sequence[str], /) -> Iterable[FoundCheckpoint]: ...
