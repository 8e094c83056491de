"""Checkpoints of several ranks: each writes and hashes its shards, rank 0 seals once all have.

The folder has our own layout, with torch.distributed.checkpoint's files in it. They hold DDP, FSDP2 and whatever else
its state-dict functions know, and load onto any number of ranks.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptguard.errors import RecordsError, SettingsError, StateError
from ckptguard.layouts.own import folder_name
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import Run
from ckptguard.runs.removal import remove_temporary
from ckptguard.runs.run_view import RunView
from ckptguard.storage.failures import translated
from ckptguard.training.content.host_copy import HostCopy
from ckptguard.training.content.safetensors_file import NotAsSealed
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.ranks import GlooRanks, Led, each, together
from ckptguard.training.saving.destinations import SaveTurn, local_root
from ckptguard.training.saving.own_layout import read_state
from ckptguard.training.saving.stores import Extra, PreparedSave, part_of_rank
from ckptguard.training.sharded.dcp_plan import LastPlan
from ckptguard.training.sharded.sharded_save import ShardedSave, live_of_all, put_back, torch_failures
from ckptguard.upkeep.leftovers import collect_saves
from ckptguard.values.ids import CheckpointId, series_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.temporary_names import VISIBLE

_log = logging.getLogger("ckptguard")


@dataclass
class _Channel:
    """The ranks of background saves. Their threads must not use the group of the training threads, nor share one
    between two saves."""

    ranks: GlooRanks
    busy: bool = False


class ShardedStore:
    """See `Store` and `LedStore`. All ranks must create it.

    Copies with NaN or infinity are not saved, except in masks and in tensors that the settings allow.
    """

    hashes_on_load = False  # rank 0 verifies it first, and every rank then loads through torch

    def __init__(self, run: Run, parts: TrainingParts, ranks: GlooRanks, settings: Settings) -> None:
        self._run, self._parts, self._ranks, self._settings = run, parts, ranks, settings
        self._host, self._last = HostCopy(), LastPlan()
        self.led = Led(ranks, load=self._load)
        self._channel: _Channel | None = None
        self.series = series_of(folder_name(1))
        self._root = local_root(run)
        self._check_visible()
        if ranks.rank == 0:
            collect_saves(run)

    def prepare(self, step: int, extra: Mapping[str, Any], *, copy: bool = False) -> PreparedSave:
        """All ranks copy, or none. This and `write` raise RanksError with the ranks that failed. Then nothing of the
        save is left."""
        channel = self._free_channel() if copy else None
        view = RunView(self._run, self._settings)
        save = ShardedSave(view, self._parts, self._ranks, self._last, step, extra)
        if channel is None:
            return PreparedSave(path=save.path, write=functools.partial(save.write, self._ranks))
        short = together(self._ranks, f"copying step {step}", lambda: self._no_room_for(save))
        if any(short):
            raise MemoryError(next(why for why in short if why))
        channel.busy = True

        def write(turn: SaveTurn) -> None:
            try:
                save.write(channel.ranks, turn)
            finally:
                channel.busy = False

        return PreparedSave(path=save.path, write=write)

    def read(self, manifest: Manifest) -> Extra:
        """Raise RanksError or StateError if a rank could not load it."""
        extra: Extra = self.led.on_all("load", manifest.step, manifest.generation)
        return extra

    def _load(self, step: int, generation: int) -> Extra:
        """Load a verified checkpoint on all ranks at once."""
        path = folder_name(step)
        what = f"loading {path}"

        def read() -> dict[str, Any]:
            manifest = read_manifest(self._run, CheckpointId(self.series, step, generation))
            if manifest is None:
                raise RecordsError(f"rank {self._ranks.rank} sees no manifest of step {step}")
            try:
                return read_state(self._run, manifest)
            except NotAsSealed as error:  # rank 0 verified it: no rank may use another one
                raise StateError(error.message) from error

        state = each(self._ranks, what, read)
        live = live_of_all(self._parts, self._ranks, what, with_optimizer="optimizer" not in state)
        together(self._ranks, what, lambda: self._compare_names(path, live["model"]))
        self._load_shards(path, live)
        together(self._ranks, what, lambda: put_back(self._parts, state, live))
        return part_of_rank(self._ranks, state["ranks"])

    def _load_shards(self, path: str, live: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(os.path.join(self._root, path))
        planner = DefaultLoadPlanner(allow_partial_load=not self._parts.strict)
        with torch_failures(f"{path} could not be loaded"):
            load(live, storage_reader=reader, planner=planner, process_group=self._ranks.group)

    def _compare_names(self, path: str, model: Mapping[str, Any]) -> None:
        """Raise StateError if `strict` and the names differ: torch ignores what the model does not have."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        with torch_failures(f"{path} could not be read"):
            stated = FileSystemReader(os.path.join(self._root, path)).read_metadata().state_dict_metadata
        saved = {name.removeprefix("model.") for name in stated if name.startswith("model.")}
        own, begun = set(model), {beginning for name in saved for beginning in _beginnings(name)}
        self._parts.compare(missing=own - begun, unexpected={n for n in saved if own.isdisjoint(_beginnings(n))})

    def _no_room_for(self, save: ShardedSave) -> str | None:
        try:
            save.copy_into(self._host, self._settings.allow_nonfinite)
        except MemoryError as error:
            return str(error) or "not enough memory for a copy"
        return None

    def _free_channel(self) -> _Channel:
        """Return a group for the next background save only. A group that an abandoned save may still use, or that lost
        a message, is replaced."""
        old = self._channel
        if self._ranks.any(old is None or old.busy or old.ranks.broken):
            if old is not None and not old.busy:
                old.ranks.leave()
            self._channel = _Channel(self._ranks.again())
        assert self._channel is not None
        return self._channel

    def _check_visible(self) -> None:
        """Raise SettingsError on every rank unless all see the folder that rank 0 sees."""
        name = str(self._ranks.tell(VISIBLE.new()))
        place = os.path.join(self._root, name)
        try:
            each(self._ranks, "writing to the run", lambda: _touch(place) if self._ranks.rank == 0 else None)
            blind = [rank for rank, sees in enumerate(self._ranks.gather(os.path.exists(place))) if not sees]
        finally:
            if self._ranks.rank == 0 and os.path.exists(place):
                remove_temporary(self._run.storage, name)
        if blind:
            raise SettingsError(
                f"the run {self._run.url} of rank 0 is not the run of ranks {blind}",
                hint="use storage that all ranks share",
            )


def _beginnings(name: str) -> list[str]:
    """Return a name and its prefixes: torch saves a value that is not a tensor in parts, under longer names."""
    return [*(name[: dot.start()] for dot in re.finditer(r"\.", name)), name]


def _touch(place: str) -> None:
    with translated("", place):
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
