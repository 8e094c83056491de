"""Checkpoints of several ranks: planned by all, written and hashed by each, sealed by rank 0 once all have written. One
rank saves so, too, if its model is sharded, or if several ranks began the run.

The folder has our own layout, with torch.distributed.checkpoint's files in it. They hold DDP, FSDP2 and whatever else
its state-dict functions know, under names that all ranks share, and load onto any number of ranks.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from ckptguard.errors import CkptguardError, RanksError, RecordsError, SettingsError, SickTrainingError, StateError
from ckptguard.layouts.own import folder_name
from ckptguard.layouts.roles import assign_roles
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import Run
from ckptguard.runs.removal import remove_temporary
from ckptguard.runs.run_view import RunView
from ckptguard.scan import ScanOptions, scan_files
from ckptguard.storage.failures import translated
from ckptguard.training.content.host_copy import HostCopy
from ckptguard.training.content.safetensors_file import NotAsSealed
from ckptguard.training.content.tagged_json import decode_state, encode_state, to_text
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.ranks import Led, Ranks, each, together
from ckptguard.training.saving.destinations import LocalFolder, SaveTurn, local_root, room_for, settle, temporary_name
from ckptguard.training.saving.own_layout import STATE_FORMAT, is_sharded, read_state, write_state
from ckptguard.training.saving.stores import Extra, PreparedSave, part_of_rank
from ckptguard.training.sharded.dcp_plan import HashingWriter, LastPlan, Planned, from_words, in_words
from ckptguard.training.signals.weights import first_of
from ckptguard.upkeep.leftovers import collect_saves
from ckptguard.values.ids import CheckpointId, series_of
from ckptguard.values.manifest import File, Manifest
from ckptguard.values.own_log import log as _log
from ckptguard.values.settings import Settings
from ckptguard.values.temporary_names import VISIBLE
from ckptguard.verification.collect_evidence import manifest_file


@dataclass
class _Channel:
    """The ranks of background saves. Their threads must not use the group of the training threads, nor share one
    between two saves."""

    ranks: Ranks
    busy: bool = False


class ShardedStore:
    """See `Store` and `LedStore`. All ranks must create it.

    Copies with NaN or infinity are not saved, except in masks and in tensors that the settings allow.
    """

    hashes_on_load = False  # rank 0 verifies it first, and every rank then loads through torch

    def __init__(self, run: Run, parts: TrainingParts, ranks: Ranks, settings: Settings) -> None:
        self._run, self._parts, self._ranks, self._settings = run, parts, ranks, settings
        self._host, self._last = HostCopy(), LastPlan()
        self.led = Led(ranks, load=self._load)
        self._channel: _Channel | None = None
        self.series = series_of(folder_name(1))
        self._root = local_root(run)
        self._check_visible()
        if ranks.rank == 0:
            collect_saves(run)

    def prepare(self, step: int, extra: Mapping[str, Any], *, copy: bool = False, full: bool = True) -> PreparedSave:
        """All ranks copy, or none. This and `write` raise RanksError with the ranks that failed. Then nothing of the
        save is left."""
        channel = self._free_channel() if copy else None
        view = RunView(self._run, self._settings)
        save = ShardedSave(view, self._parts, self._ranks, self._last, step, extra, full=full)
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

        def read() -> tuple[dict[str, Any], bool]:
            manifest = read_manifest(self._run, CheckpointId(self.series, step, generation))
            if manifest is None:
                raise RecordsError(f"rank {self._ranks.rank} sees no manifest of step {step}")
            if not is_sharded(manifest):
                raise StateError(
                    f"{path} was saved by one rank alone: several ranks cannot go on from it",
                    hint="begin another run with several ranks, from what ckptguard.load gives for this one",
                )
            try:
                state = read_state(self._run, manifest)
            except NotAsSealed as error:  # rank 0 verified it: no rank may use another one
                raise StateError(error.message) from error
            return state, "optimizer" not in state and not manifest.thinned

        state, has_tensors = each(self._ranks, what, read)
        live = live_of_all(self._parts, self._ranks, what, with_optimizer=has_tensors)
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
        with torch_failures(f"{path} could not be loaded"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process loads alone
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


class ShardedSave:
    """All ranks create it at once and agree on what each writes: one rank writes a tensor that several hold.

    RanksError names the ranks that failed. After any failure nothing of it is left.
    """

    def __init__(
        self,
        view: RunView,
        parts: TrainingParts,
        ranks: Ranks,
        last: LastPlan,
        step: int,
        extra: Mapping[str, Any],
        *,
        full: bool = True,
    ) -> None:
        self._view, self._step, self._full = view, step, full or parts.optimizer is None
        self.path = folder_name(step)
        self._what = f"saving step {step}"
        self._temporary = str(ranks.tell(temporary_name(step)))
        self._leads = ranks.rank == 0
        self._sealed = False
        self._metrics = extra.get("metrics")
        self._sick: Sequence[str] | None = None  # patterns of tensors that may hold NaN, if they are to be checked
        self._extra, self._state = each(
            ranks, self._what, lambda: (encode_state(dict(extra), path="extra"), self._sections(parts, ranks))
        )
        self._writer = HashingWriter(self._place(SaveTurn()).folder)
        # Without a state torch would make one by stepping the optimizer, which differs from an uninterrupted training.
        has_stepped = full and ranks.any(parts.optimizer is not None and bool(parts.optimizer.state))
        live = live_of_all(parts, ranks, self._what, with_optimizer=has_stepped)
        with torch_failures(f"step {step} could not be saved"):
            self._planned = Planned(live, self._writer, ranks, last)

    def copy_into(self, host: HostCopy, allow: Sequence[str]) -> None:
        """Copy what this rank writes. NaN and infinity are not saved, except in masks and in tensors that `allow`
        matches.

        Raises MemoryError.
        """
        self._planned.copy_into(host)
        self._sick = allow

    def write(self, ranks: Ranks, turn: SaveTurn) -> None:
        """Write and seal, over `ranks` that nothing else uses meanwhile. For `turn` see `write_checkpoint`.

        The gate counts on rank 0. A save abandoned on another rank fails.
        """
        place = self._place(turn)
        try:
            size = sum(together(ranks, self._what, lambda: self._planned.bytes))
            together(ranks, self._what, lambda: room_for(self._view, size, self.path) if self._leads else None)
            reports = together(ranks, self._what, lambda: self._write_own(place))
            sick = [f"rank {rank}: {own['sick']}" for rank, own in enumerate(reports) if own["sick"] is not None]
            if sick:
                raise SickTrainingError(f"not saved: {sick[0]} holds NaN or infinity", known_good=None)
            together(ranks, self._what, lambda: self._index(reports))
            # Only now: reading a file needs the index.
            found = together(ranks, self._what, self._read_back)
            try:
                together(ranks, f"sealing step {self._step}", lambda: self._seal(place, turn, reports, found))
            except RanksError:
                if not self._sealed:
                    raise
                _log.warning("step %s is sealed, but not every rank was informed", self._step)
        finally:
            place.close()

    def _place(self, turn: SaveTurn) -> LocalFolder:
        """Return the folder that all ranks write into."""
        return LocalFolder(self._view, self._step, turn, temporary=self._temporary, leads=self._leads)

    def _sections(self, parts: TrainingParts, ranks: Ranks) -> dict[str, Any]:
        """Return what all ranks share besides tensors, from rank 0."""
        if not self._leads:
            return {}
        state: dict[str, Any] = {"ckptguard_state": STATE_FORMAT, "step": self._step, "world_size": ranks.size}
        for part, value in (("scheduler", parts.scheduler), ("scaler", parts.scaler)):
            if value is not None:
                state[part] = encode_state(value.state_dict(), path=part)
        if self._full and parts.optimizer is not None and not parts.optimizer.state:
            state["optimizer"] = encode_state(parts.optimizer.state_dict(), path="optimizer")
        return state

    def _write_own(self, place: LocalFolder) -> dict[str, Any]:
        """Write this rank's file. Returns what rank 0 must know about it, as JSON values."""
        sick = self._sick_tensor(self._sick) if self._sick is not None else None
        if sick is not None:
            return {"sick": sick}
        place.open()
        results = self._planned.write(place.check_stop)
        return {"sick": None, "extra": self._extra, "results": [in_words(result) for result in results]}

    def _index(self, reports: Sequence[Mapping[str, Any]]) -> None:
        if self._leads:
            self._planned.finish([[from_words(words) for words in answer["results"]] for answer in reports])

    def _sick_tensor(self, allow: Sequence[str]) -> str | None:
        """Return the first copied tensor that must not be saved, by its name in the model."""
        named = []
        for name, tensor in self._planned.copied_floats():
            own = name.removeprefix("model.")
            known_as = (name, own, f"module.{own}")  # in the checkpoint, in the model, and in its wrapper
            if not any(fnmatchcase(known, pattern) for known in known_as for pattern in allow):
                named.append((own, tensor))
        return first_of(named)

    def _read_back(self) -> list[Any]:
        """Read this rank's files: the storage must have exactly what was hashed."""
        digests = self._writer.digests
        keys = [f"{self._temporary}/{file}" for file in sorted(digests)]
        scan = scan_files(self._view.run.storage, keys, ScanOptions(md5=False, sums=("blake3",), workers=1))
        files = []
        for scanned in scan.files:
            file = scanned.entry.key.removeprefix(self._temporary + "/")
            if scanned.sums["blake3"] != digests[file]:
                raise StateError(f"{file} was not stored as it was written")
            key = f"{self.path}/{file}"
            roles = assign_roles(key, scanned.structure.tensors, containers=scanned.structure.containers)
            sealed = manifest_file(scanned, tuple(roles))
            files.append(msgspec.to_builtins(msgspec.structs.replace(sealed, path=key)))
        return files

    def _seal(
        self, place: LocalFolder, turn: SaveTurn, reports: Sequence[Mapping[str, Any]], found: Sequence[Any]
    ) -> None:
        if not self._leads:
            return
        files = [msgspec.convert(file, File, strict=False) for own in found for file in own]
        text = to_text(self._state | {"ranks": [own["extra"] for own in reports]})
        files.append(write_state(place, self.path, text))
        settle(self._view, place.commit(files, self._metrics, full=self._full), turn)
        self._sealed = True


def live_of_all(parts: TrainingParts, ranks: Ranks, what: str, *, with_optimizer: bool) -> dict[str, Any]:
    """Return this rank's tensors, once every rank has its own: no rank may wait in torch for one without them."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    def live() -> dict[str, Any]:
        found: dict[str, Any] = {"model": get_model_state_dict(parts.model)}
        if with_optimizer and parts.optimizer is not None:
            found["optimizer"] = get_optimizer_state_dict(parts.model, parts.optimizer)
        return found

    return each(ranks, what, live)


def put_back(parts: TrainingParts, state: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Load the state: tensors that were loaded into `live_of_all`, and a checkpoint's other state."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    model, optimizer, parts.restarted = parts.model, parts.optimizer, ()
    set_model_state_dict(model, live["model"], options=StateDictOptions(strict=parts.strict))
    if "optimizer" in live:
        set_optimizer_state_dict(model, optimizer, live["optimizer"])
    elif optimizer is not None and "optimizer" in state:
        optimizer.load_state_dict(decode_state(state["optimizer"]))
    elif optimizer is not None:
        parts.restart("optimizer", optimizer)
    for name, part in (("scheduler", parts.scheduler), ("scaler", parts.scaler)):
        if part is not None:
            if name not in state:
                raise StateError(f"the checkpoint holds no state of the {name}")
            part.load_state_dict(decode_state(state[name]))


@contextmanager
def torch_failures(what: str) -> Iterator[None]:
    """Turn any error of torch into RanksError, with its message and ranks, without its stacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CkptguardError:
        raise
    except (Exception, CheckpointException) as error:  # torch's own is not an Exception
        failures = getattr(error, "failures", None)
        if isinstance(failures, dict) and failures:
            said = "; ".join(f"rank {rank}: {trouble[0]!r}" for rank, trouble in failures.items())
        else:
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise RanksError(f"{what}: {said}") from error


def _beginnings(name: str) -> list[str]:
    """Return a name and its prefixes: torch saves a value that is not a tensor in parts, under longer names."""
    return [*(name[: dot.start()] for dot in re.finditer(r"\.", name)), name]


def _touch(place: str) -> None:
    with translated("", place):
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
