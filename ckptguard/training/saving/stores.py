"""Where a guard's checkpoints go: our own layout, or the user's own files through `save` and `load`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ckptguard.errors import (
    CkptguardError,
    CouldNotTellError,
    ObjectExistsError,
    ObjectMissingError,
    RanksError,
    SettingsError,
    StateError,
    StorageError,
)
from ckptguard.layouts.own import FOLDER, folder_name
from ckptguard.layouts.step_names import step_from_name
from ckptguard.records.manifests import forget_metrics, write_metrics
from ckptguard.records.run import Run, create_record, list_records, read_record
from ckptguard.runs.free_space import need_room
from ckptguard.runs.history import history_of_series
from ckptguard.runs.run_view import RunView
from ckptguard.training.content.host_copy import HostCopy
from ckptguard.training.content.tagged_json import decode_state, encode_state, from_text, to_text
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.ranks import Ranks, each, together
from ckptguard.training.saving.destinations import Gate, make_room
from ckptguard.training.saving.own_layout import read_checkpoint, snapshot_of, write_checkpoint
from ckptguard.upkeep.leftovers import collect_saves
from ckptguard.values.ids import CheckpointId, is_safe_path, is_temporary, numbers_of, series_folder, series_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings

_log = logging.getLogger("ckptguard")
Extra = dict[str, Any]


class Store(Protocol):
    """One kind of checkpoint in a run. `hashes_on_load`: `read` itself holds every byte against the manifest."""

    hashes_on_load: bool

    @property
    def series(self) -> str:
        """The series of the checkpoints."""

    def write(self, step: int, extra: Mapping[str, Any]) -> str:
        """Save everything for a step, with `extra` beside it, and its ``metrics`` in the manifest too; returns the
        path in the run."""

    def read(self, manifest: Manifest) -> Extra:
        """Load a checkpoint that was just verified; returns what was saved beside it (empty: unknown). NotAsSealed says
        what is wrong with its bytes, if loading found that."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A copy of everything that belongs to one step, not written yet. `write` seals it under `path` in the run; any
    thread may call it, once."""

    path: str
    write: Callable[[Gate], object]


@runtime_checkable
class CopyingStore(Store, Protocol):
    """A store that can take a copy now and write it later."""

    def copy(self, step: int, extra: Mapping[str, Any]) -> Copied:
        """Copy everything that a save of this step needs. The copy before it must have been written or given up: its
        memory is used again. MemoryError if there is no room."""


class LedStore(Store, Protocol):
    """A store of several ranks: `write` is called by all of them; `read` by rank 0 alone, while the others `follow`."""

    def finish(self, answer: object) -> None:
        """Rank 0: end what the other ranks follow, with this answer (a JSON value)."""

    def follow(self) -> tuple[Any, Extra]:
        """The other ranks: load whatever rank 0 loads, until it is done; its answer, and this rank's part of what was
        saved beside the checkpoint that was loaded last."""


def part_of_rank(ranks: Ranks, saved: list[Any]) -> Extra:
    """This rank's part of what each rank saved beside a checkpoint; of other numbers of ranks only what all share."""
    if len(saved) == ranks.size:
        return dict(decode_state(saved[ranks.rank]))
    if saved:
        why = "saved by %d ranks, loaded by %d: the data starts its epoch anew, with new random numbers"
        _log.warning(why, len(saved), ranks.size)
    first = decode_state(saved[0]) if saved else {}
    return {"guard": first["guard"]} if "guard" in first else {}


class OwnStore:
    """Our own layout: hashed while it is written and while it is loaded. NaN and infinity are not loaded, except in
    masks and in tensors that the settings allow."""

    hashes_on_load = True

    def __init__(self, run: Run, parts: TrainingParts, settings: Settings) -> None:
        self._run, self._parts, self._settings = run, parts, settings
        self._host = HostCopy()
        self.series = series_of(folder_name(1))
        parts.check()
        collect_saves(run)

    def write(self, step: int, extra: Mapping[str, Any]) -> str:
        snapshot = snapshot_of(step, self._parts.capture(), extra)
        return write_checkpoint(RunView(self._run, self._settings), snapshot).path

    def copy(self, step: int, extra: Mapping[str, Any]) -> Copied:
        live = snapshot_of(step, self._parts.capture(), extra)
        copied = dataclasses.replace(live, captured=self._host.take(live.captured))
        return Copied(
            path=folder_name(step),
            write=lambda gate: write_checkpoint(RunView(self._run, self._settings), copied, gate),
        )

    def read(self, manifest: Manifest) -> Extra:
        return read_checkpoint(self._run, manifest, self._parts, allow=self._settings.allow_nonfinite)


@dataclass(frozen=True, kw_only=True)
class UserFiles:
    """How the user's own files are saved, loaded and named."""

    save: Callable[[str, int], object]
    load: Callable[[str], object]
    name: str

    def check(self) -> str:
        """Their series; SettingsError for a name that says no step, or a step of another series each time."""
        name = self.name
        try:
            first, second = name.format(step=1), name.format(step=123456789)
        except (KeyError, IndexError, ValueError) as error:
            raise SettingsError(f"the name {name!r} cannot be filled in: it may hold {{step}} only") from error
        last = first.rpartition("/")[2]
        if first == second or not is_safe_path(first) or is_temporary(last) or step_from_name(last) != 1:
            raise SettingsError(
                f"the name {name!r} must hold {{step}}, as in step-{{step}}.pt, and stay inside the run"
            )
        if FOLDER.fullmatch(second.rpartition("/")[2]):
            raise SettingsError(f"the name {name!r} is that of our own layout", hint="add a suffix, such as .pt")
        if step_from_name(second.rpartition("/")[2]) != 123456789:
            raise SettingsError(
                f"the step cannot be told from the names that {name!r} gives: put it last, as in step-{{step}}.pt"
            )
        if series_of(first) != series_of(second):
            raise SettingsError(f"the name {name!r} gives every step a series of its own")
        return series_of(first)


class UserStore:
    """The user's own files. What we save beside them lies in the records, never among the trainer's files. A save is
    taken to need as much room as the one before."""

    hashes_on_load = False

    def __init__(self, run: Run, files: UserFiles, settings: Settings) -> None:
        self.series = files.check()
        self._run, self._files, self._settings = run, files, settings
        self._size: int | None = None  # of the newest checkpoint, if known

    def write(self, step: int, extra: Mapping[str, Any]) -> str:
        path = self._files.name.format(step=step)
        encoded = encode_state(dict(extra), path="extra")
        text = to_text({"ckptguard_state": 1, "step": step, "extra": encoded, "check": _check(encoded)})
        view = RunView(self._run, self._settings)
        self._need_room(view, path)
        make_room(view, path)
        id = history_of_series(self._run, self.series).next_id(self.series, step)
        place = self._run.usable(path)
        if extra.get("metrics"):
            write_metrics(self._run, id, extra["metrics"])
        if self._run.storage.root is not None:
            os.makedirs(os.path.dirname(place), exist_ok=True)
        try:
            self._files.save(place, step)
        except BaseException:
            if extra.get("metrics"):
                forget_metrics(self._run, id)
            self._remove_half(path, place)
            raise
        try:
            self._run.storage.stat(path)
        except ObjectMissingError as error:
            raise StateError(f"save() wrote nothing to {place}", hint="save exactly to the path it is given") from error
        found = view.look_again(path)
        if found is None or found.step != step:
            raise StateError(
                f"what save() wrote to {place} is not recognised as the checkpoint of step {step}",
                hint="give `name` a suffix such as .pt, or have save() write model files into a folder",
            )
        self._size = found.bytes
        for number in range(1, 1000):
            # What exists is of an earlier save of this generation, of which nothing else is left.
            with contextlib.suppress(ObjectExistsError):
                create_record(self._run, f"{_beside(path, id)}{number:04d}.json", text)
                break
        return path

    def read(self, manifest: Manifest) -> Extra:
        self._files.load(self._run.usable(manifest.path))
        prefix = _beside(manifest.path, manifest.id)
        folder, _, start = prefix.rpartition("/")
        names = sorted(n for n in list_records(self._run, folder) if n.startswith(start) and n.endswith(".json"))
        text = read_record(self._run, f"{folder}/{names[-1]}") if names else None
        if text is None:
            _log.warning("nothing is recorded beside %s: the data starts its epoch anew", manifest.path)
            return {}
        try:
            state = from_text(text)
            extra = decode_state(state["extra"])
            if not isinstance(extra, dict) or state.get("check", "") not in ("", _check(state["extra"])):
                raise StateError("it is not what was recorded")
        except (StateError, KeyError, TypeError, AttributeError) as error:
            why = "what is recorded beside %s cannot be used, the data starts its epoch anew: %s"
            _log.warning(why, manifest.path, error)
            return {}
        return extra

    def _need_room(self, view: RunView, path: str) -> None:
        if self._run.storage.root is None:
            return  # nothing tells what is free there
        if self._size is None:
            with contextlib.suppress(CouldNotTellError):
                own = [c for c in view.checkpoints if c.series == self.series]
                self._size = max(own, key=lambda c: numbers_of(c.step)).bytes if own else None
        if self._size is not None:
            what = f"{path}, if it is as large as the one before"
            need_room(self._run.storage, self._size, what, wait=self._settings.on_full == "wait")

    def _remove_half(self, path: str, place: str) -> None:
        """A save that raised leaves half a file under its final name; the name was free before."""
        with contextlib.suppress(OSError, StorageError):
            if self._run.storage.root is None:
                self._run.storage.remove(path)
            elif os.path.isdir(place) and not os.path.islink(place):
                shutil.rmtree(place)
            else:
                os.unlink(place)


class CollectiveStore(UserStore):
    """The user's own files where several ranks train: all call `save` and `load`, with the same path. So do the
    frameworks' own functions want it; one that writes on one rank only returns at once on the others. See `LedStore`;
    to be made by all ranks. What belongs to a rank (random numbers, position in the data) is recorded for each. It
    cannot go on behind training: the functions read the live state, and talk over the groups over which training
    talks."""

    def __init__(self, run: Run, files: UserFiles, settings: Settings, ranks: Ranks) -> None:
        on_all = UserFiles(save=self._save_on_all, load=self._load_on_all, name=files.name)
        super().__init__(run, on_all, settings.changed(on_full="error"))  # the other ranks wait for what rank 0 does
        self._ranks, self._here = ranks, files

    def write(self, step: int, extra: Mapping[str, Any]) -> str:
        """RanksError names the ranks that could not do their part."""
        reports = together(self._ranks, f"saving step {step}", lambda: encode_state(dict(extra), path="extra"))
        if self._ranks.rank == 0:
            try:
                path = super().write(step, {"ranks": reports})
            except Exception as error:
                self._ranks.tell(["failed", str(error)])
                raise
            self._ranks.tell(["done", path])
            return path
        while True:
            order, said = self._ranks.tell(None)
            if order == "done":
                return str(said)
            if order == "failed":
                raise RanksError(f"rank 0: {said}")
            self._take_part(f"saving step {step}", functools.partial(self._here.save, said, step))

    def read(self, manifest: Manifest) -> Extra:
        """RanksError if a rank could not load it."""
        saved = super().read(manifest).get("ranks", [])
        self._ranks.tell(["extra", saved])
        return part_of_rank(self._ranks, saved)

    def finish(self, answer: object) -> None:
        self._ranks.tell(["end", answer])

    def follow(self) -> tuple[Any, Extra]:
        extra: Extra = {}
        while True:
            order, said = self._ranks.tell(None)
            if order == "end":
                return said, extra
            if order == "extra":
                extra = part_of_rank(self._ranks, said)
            else:
                self._take_part(f"loading {said}", functools.partial(self._here.load, said))

    def _save_on_all(self, place: str, step: int) -> None:
        self._ranks.tell(["save", place])
        each(self._ranks, f"saving step {step}", lambda: self._here.save(place, step))

    def _load_on_all(self, place: str) -> None:
        self._ranks.tell(["load", place])
        each(self._ranks, f"loading {place}", lambda: self._here.load(place))

    def _take_part(self, what: str, work: Callable[[], object]) -> None:
        try:
            each(self._ranks, what, work)
        except CkptguardError as error:
            _log.warning("%s", error.message)  # rank 0 has it too, and says how it ends


def _beside(path: str, id: CheckpointId) -> str:
    """How the records of what is saved beside a checkpoint begin."""
    return f"training/{series_folder(path)}.{id.generation}."


def _check(encoded: Any) -> str:
    """A record has no checksum of its own, and what it holds has no other copy."""
    return f"{zlib.crc32(to_text(encoded)):08x}"
