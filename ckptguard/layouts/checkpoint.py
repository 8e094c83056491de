"""A checkpoint as a listing shows it, and what names tell: step, series, parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ckptguard.formats.structure import Structure
from ckptguard.names import MAX_STEP
from ckptguard.storage.protocol import Entry


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything saved for one step. `path` is relative to the run; "." means model files at the run's root.

    `entries` are its regular files and `irregular` everything else in it (links, FIFOs, ...), keys relative to the
    run, sorted. `step` is None where names cannot tell it.
    """

    path: str
    layout: str
    series: str
    step: int | None
    entries: tuple[Entry, ...]
    irregular: tuple[Entry, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Keys of the regular files."""
        return tuple(e.key for e in self.entries)

    @property
    def bytes(self) -> int:
        """Total size of the regular files."""
        return sum(e.size for e in self.entries)

    @property
    def signature(self) -> tuple[tuple[object, ...], ...]:
        """Equal signatures mean that nothing the storage reports about any file has changed."""
        return tuple((e.key, *e.signature) for e in (*self.entries, *self.irregular))

    def inside(self, key: str) -> str:
        """A file's name relative to the checkpoint."""
        return key if self.path == "." or key == self.path else key.removeprefix(self.path + "/")


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the layout implies and that is not there. `fatal`: the checkpoint cannot be used without it."""

    message: str
    file: str | None = None
    fatal: bool = True


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table of layouts.

    `gaps(checkpoint, structures)` says what is missing, from the listing and the structures of the files (by key);
    no fatal gap and no structure problem means finished, once the files are quiet. `last_written` names the file that
    the writer writes last, relative to the checkpoint ("" where there is none). `sealed_by_writer`: finished by its
    writer's manifest alone; an observer never seals it.
    """

    name: str
    gaps: Callable[[Checkpoint, Mapping[str, Structure]], Sequence[Gap]]
    last_written: str = ""
    sealed_by_writer: bool = False


_STEP = re.compile(r"(?:^|[^a-z])(?:global_?step|step|iter(?:ation)?)[-_=.]?(\d+)", re.IGNORECASE)
_COUNTED = re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt|epoch|ep|it)[-_=.]?(\d+)", re.IGNORECASE)
_TRAILING = re.compile(r"(?:^|[-_]|(?<!\d)\.)(\d+)$")  # not the decimals of loss=0.35
_SUFFIX = re.compile(r"\.(?:safetensors|pt|pth|bin|ckpt)$")
_PART = re.compile(
    r"-\d+-of-\d+\.|(?:^|_)mp_rank_\d+|zero_pp_rank_\d+|^__\d+_\d+|rank[-_]?\d+|^(?:rng_state|random_states|custom_checkpoint)_\d+"
    r"|^(?:model|pytorch_model)_\d+\.(?:safetensors|bin)$|^(?:optimizer|scheduler|sampler|dl_state_dict)_\d+\.bin$"
)


def is_part(name: str) -> bool:
    """Whether a file's digits name a shard or a rank instead of a step."""
    return _PART.search(name) is not None


def step_from_name(name: str) -> int | None:
    """The step that a file or folder name states: ``step-500``, ``checkpoint-500``, ``epoch=0-step=2.ckpt``,
    ``net-500.pth``; None where it states none."""
    if is_part(name):
        return None
    stem = _SUFFIX.sub("", name)
    for pattern in (_STEP, _COUNTED, _TRAILING):
        found = pattern.findall(stem)
        if found:
            step = int(found[-1][:20])
            return step if step <= MAX_STEP else None
    return None
