"""Where a guard's checkpoints go: our own layout, or the user's own files through `save` and `load`."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ckptguard.errors import (
    CouldNotTellError,
    ObjectExistsError,
    ObjectMissingError,
    SettingsError,
    StateError,
    StorageError,
)
from ckptguard.layouts.own import FOLDER, folder_name
from ckptguard.layouts.step_names import step_from_name
from ckptguard.records.metrics import forget_metrics, write_metrics
from ckptguard.records.run import Run, create_record, list_records, read_record
from ckptguard.runs.free_space import need_room
from ckptguard.runs.history import load_history
from ckptguard.runs.listing import find_checkpoint, list_checkpoints
from ckptguard.training.content.host_copy import HostCopy
from ckptguard.training.content.tagged_json import decode_state, encode_state, from_text, to_text
from ckptguard.training.content.training_parts import Parts
from ckptguard.training.ranks import Ranks
from ckptguard.training.saving.background_save import Gate
from ckptguard.training.saving.own_files import make_room
from ckptguard.training.saving.own_layout import read_checkpoint, state_text, write_checkpoint
from ckptguard.upkeep.leftover_saves import collect_saves
from ckptguard.values.ids import is_safe_path, is_temporary, series_folder, series_of
from ckptguard.values.manifest import Manifest

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

    def read(self, manifest: Manifest) -> tuple[Extra, str | None]:
        """Load a checkpoint that was just verified. Returns what was saved beside it (empty: unknown), and what is
        wrong with its bytes, if loading found that."""


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
        _log.warning(
            "saved by %d ranks, loaded by %d: the data starts its epoch anew, with new random numbers",
            len(saved),
            ranks.size,
        )
    first = decode_state(saved[0]) if saved else {}
    return {"guard": first["guard"]} if "guard" in first else {}


class OwnStore:
    """Our own layout: hashed while it is written and while it is loaded. NaN and infinity are not loaded, except in
    masks and in tensors that `allow` matches. Where there is no room for a save it is an error, or `wait_for_room`."""

    hashes_on_load = True

    def __init__(self, run: Run, parts: Parts, *, allow: Sequence[str] = (), wait_for_room: bool = False) -> None:
        self._run, self._parts, self._allow, self._wait = run, parts, allow, wait_for_room
        self._host = HostCopy()
        self.series = series_of(folder_name(1))
        parts.check()
        collect_saves(run)

    def write(self, step: int, extra: Mapping[str, Any]) -> str:
        """See `Store`."""
        captured = self._parts.capture()
        text = state_text(step, captured, extra)
        metrics = extra.get("metrics")
        return write_checkpoint(
            self._run, step, captured, text, allow=self._allow, metrics=metrics, wait_for_room=self._wait
        ).path

    def copy(self, step: int, extra: Mapping[str, Any]) -> Copied:
        """See `CopyingStore`."""
        captured = self._parts.capture()
        text = state_text(step, captured, extra)
        copied, metrics = self._host.take(captured), extra.get("metrics")
        return Copied(
            path=folder_name(step),
            write=lambda gate: write_checkpoint(
                self._run, step, copied, text, gate, allow=self._allow, metrics=metrics, wait_for_room=self._wait
            ),
        )

    def read(self, manifest: Manifest) -> tuple[Extra, str | None]:
        """See `Store`."""
        return read_checkpoint(self._run, manifest, self._parts, allow=self._allow)


def _check(encoded: Any) -> str:
    """A record has no checksum of its own, and what it holds has no other copy."""
    return f"{zlib.crc32(to_text(encoded)):08x}"


class UserStore:
    """The user's own files. What we save beside them lies in the records, never among the trainer's files. A save is
    taken to need as much room as the one before; where there is less it is an error, or `wait_for_room`."""

    hashes_on_load = False

    def __init__(
        self,
        run: Run,
        save: Callable[[str, int], object],
        load: Callable[[str], object],
        name: str,
        *,
        wait_for_room: bool = False,
    ) -> None:
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
        self._run, self._save, self._load, self._name = run, save, load, name
        self.series = series_of(first)
        self._wait = wait_for_room
        self._size: int | None = None  # of the newest checkpoint, if known

    def write(self, step: int, extra: Mapping[str, Any]) -> str:
        """See `Store`."""
        path = self._name.format(step=step)
        encoded = encode_state(dict(extra), path="extra")
        text = to_text({"ckptguard_state": 1, "step": step, "extra": encoded, "check": _check(encoded)})
        self._need_room(path)
        make_room(self._run, path)
        generation = load_history(self._run).next_generation(self.series, step)
        place = self._run.usable(path)
        if extra.get("metrics"):
            write_metrics(self._run, self.series, step, generation, extra["metrics"])
        if self._run.storage.root is not None:
            os.makedirs(os.path.dirname(place), exist_ok=True)
        try:
            self._save(place, step)
        except BaseException:
            if extra.get("metrics"):
                forget_metrics(self._run, self.series, step, generation)
            self._remove_half(path, place)
            raise
        try:
            self._run.storage.stat(path)
        except ObjectMissingError as error:
            raise StateError(f"save() wrote nothing to {place}", hint="save exactly to the path it is given") from error
        found = find_checkpoint(self._run, path)
        if found is None or found.step != step:
            raise StateError(
                f"what save() wrote to {place} is not recognised as the checkpoint of step {step}",
                hint="give `name` a suffix such as .pt, or have save() write model files into a folder",
            )
        self._size = found.bytes
        for number in range(1, 1000):
            try:
                create_record(self._run, f"{self._beside(path, generation)}{number:04d}.json", text)
                break
            except ObjectExistsError:
                continue  # an earlier save of this generation, of which nothing else is left
        return path

    def read(self, manifest: Manifest) -> tuple[Extra, str | None]:
        """See `Store`."""
        self._load(self._run.usable(manifest.path))
        prefix = self._beside(manifest.path, manifest.generation)
        folder, _, start = prefix.rpartition("/")
        names = sorted(n for n in list_records(self._run, folder) if n.startswith(start) and n.endswith(".json"))
        text = read_record(self._run, f"{folder}/{names[-1]}") if names else None
        if text is None:
            _log.warning("nothing is recorded beside %s: the data starts its epoch anew", manifest.path)
            return {}, None
        try:
            state = from_text(text)
            extra = decode_state(state["extra"])
            if not isinstance(extra, dict) or state.get("check", "") not in ("", _check(state["extra"])):
                raise StateError("it is not what was recorded")
        except (StateError, KeyError, TypeError, AttributeError) as error:
            _log.warning(
                "what is recorded beside %s cannot be used, the data starts its epoch anew: %s", manifest.path, error
            )
            return {}, None
        return extra, None

    def _beside(self, path: str, generation: int) -> str:
        return f"training/{series_folder(path)}.{generation}."

    def _need_room(self, path: str) -> None:
        if self._run.storage.root is None:
            return  # nothing tells what is free there
        if self._size is None:
            with contextlib.suppress(CouldNotTellError):
                own = [c for c in list_checkpoints(self._run) if c.series == self.series]
                self._size = max(own, key=lambda c: c.step or 0).bytes if own else None
        if self._size is not None:
            need_room(self._run.storage, self._size, f"{path}, if it is as large as the one before", wait=self._wait)

    def _remove_half(self, path: str, place: str) -> None:
        """A save that raised leaves half a file under its final name; the name was free before."""
        if self._run.storage.root is None:
            with contextlib.suppress(StorageError):
                self._run.storage.remove(path)
            return
        with contextlib.suppress(OSError):
            if os.path.isdir(place) and not os.path.islink(place):
                shutil.rmtree(place)
            else:
                os.unlink(place)
