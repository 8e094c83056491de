"""Where a guard's checkpoints are stored: our own layout, or the user's own files through `save` and `load`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ckptguard.errors import (
    CkptguardError,
    CouldNotTellError,
    ObjectExistsError,
    ObjectMissingError,
    SettingsError,
    StateError,
    StorageError,
)
from ckptguard.layouts.own import FOLDER, folder_name
from ckptguard.layouts.step_names import step_from_name
from ckptguard.records.manifests import forget_metrics, read_manifest, write_metrics
from ckptguard.records.run import Run, create_record, list_records, read_record
from ckptguard.runs.history import history_of_series
from ckptguard.runs.removal import remove_half_save
from ckptguard.runs.run_view import RunView
from ckptguard.training.content.host_copy import HostCopy
from ckptguard.training.content.tagged_json import decode_state, encode_state, from_text, to_text
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.ranks import Led, Ranks, each, together
from ckptguard.training.saving.destinations import SaveTurn, make_room, room_for
from ckptguard.training.saving.own_layout import is_sharded, read_checkpoint, snapshot_of, write_checkpoint
from ckptguard.upkeep.leftovers import collect_saves
from ckptguard.values.ids import CheckpointId, is_safe_path, is_temporary, numbers_of, series_folder, series_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.own_log import log as _log
from ckptguard.values.settings import Settings

Extra = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that is loaded now, or that a framework loads next. `path` is usable as it is. `extra` is what was
    saved beside it (empty: unknown). `saved_at`: when, in seconds. `remark` says which copy was used, and
    which newer checkpoints were not."""

    step: int
    id: CheckpointId
    path: str
    extra: Extra = dataclasses.field(default_factory=dict)
    saved_at: float | None = None
    remark: str = ""


class LoadingStore(Protocol):
    """One kind of checkpoint in a run. `hashes_on_load`: `read` compares every byte with the manifest."""

    hashes_on_load: bool

    @property
    def series(self) -> str:
        """The series of the checkpoints."""

    def read(self, manifest: Manifest) -> Extra:
        """Load a checkpoint that was just verified. Returns what was saved beside it (empty: unknown).

        Raises NotAsSealed if loading finds wrong bytes.
        """


@dataclass(frozen=True, kw_only=True)
class PreparedSave:
    """One save that is not written yet. `write` writes and seals it at `path` in the run; call it once."""

    path: str
    write: Callable[[SaveTurn], object]


class Store(LoadingStore, Protocol):
    """One that a guard saves into."""

    def prepare(self, step: int, extra: Mapping[str, Any], *, copy: bool = False, full: bool = True) -> PreparedSave:
        """Prepare to save everything for a step, with `extra` beside it, and its ``metrics`` in the manifest. Unless it
        is `full`, that is everything but the optimizer.

        With `copy` any thread may write it, while training goes on. The copy before must have been written or given up,
        because its memory is reused. MemoryError without memory for it, SettingsError if the store cannot copy.
        """


class LedStore(LoadingStore, Protocol):
    """A store of several ranks. All prepare and write. Rank 0 alone calls `read`, within `led.lead`; the others load
    what it loads, and then `led.own` is their part of the extra state."""

    led: Led


def part_of_rank(ranks: Ranks, saved: list[Any]) -> Extra:
    """Return this rank's part of the extra state. With another number of ranks, only the shared part."""
    if len(saved) == ranks.size:
        return dict(decode_state(saved[ranks.rank]))
    if saved:
        why = "the number of ranks was %d and is %d: the data epoch starts again, with new random numbers"
        _log.warning(why, len(saved), ranks.size)
    first = decode_state(saved[0]) if saved else {}
    return {"guard": first["guard"]} if "guard" in first else {}


def was_sharded(run: Run) -> bool:
    """True if the newest save of a guard in the run is sharded; such saves are on local disks only."""
    series = series_of(folder_name(1))
    if run.storage.root is None:
        return False
    with contextlib.suppress(CkptguardError):  # what is wrong with the records is said where they are needed
        newest = max(history_of_series(run, series).sealed(series), key=lambda id: id.order, default=None)
        manifest = None if newest is None else read_manifest(run, newest)
        return manifest is not None and is_sharded(manifest)
    return False


class OwnStore:
    """Our own layout: hashed while written and while loaded. NaN and infinity are not loaded, except in masks and in
    tensors that the settings allow."""

    hashes_on_load = True

    def __init__(self, run: Run, parts: TrainingParts, settings: Settings) -> None:
        self._run, self._parts, self._settings = run, parts, settings
        self._host = HostCopy()
        self.series = series_of(folder_name(1))
        parts.check()
        collect_saves(run)

    def prepare(self, step: int, extra: Mapping[str, Any], *, copy: bool = False, full: bool = True) -> PreparedSave:
        found = snapshot_of(step, self._parts.capture(full=full), extra)
        if copy:
            found = dataclasses.replace(found, captured=self._host.take(found.captured))
        return PreparedSave(
            path=folder_name(step),
            write=lambda turn: write_checkpoint(RunView(self._run, self._settings), found, turn),
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
        """Return their series. Raises SettingsError for a name without a step, or with a new series for each step."""
        name = self.name
        try:
            first, second = name.format(step=1), name.format(step=123456789)
        except (KeyError, IndexError, ValueError) as error:
            raise SettingsError(f"the name {name!r} cannot be filled in: it may only hold {{step}}") from error
        last = first.rpartition("/")[2]
        if first == second or not is_safe_path(first) or is_temporary(last) or step_from_name(last) != 1:
            raise SettingsError(
                f"the name {name!r} must hold {{step}}, as in step-{{step}}.pt, and stay inside the run"
            )
        if FOLDER.fullmatch(second.rpartition("/")[2]):
            raise SettingsError(f"the name {name!r} is reserved for our own layout", hint="add a suffix, such as .pt")
        if step_from_name(second.rpartition("/")[2]) != 123456789:
            raise SettingsError(
                f"the step cannot be read from the names that {name!r} gives: put it last, as in step-{{step}}.pt"
            )
        if series_of(first) != series_of(second):
            raise SettingsError(f"the name {name!r} gives every step its own series")
        return series_of(first)


def cannot_copy() -> SettingsError:
    """The error for the user's own files in the background."""
    return SettingsError(
        "a save= of your own cannot run in the background: it reads the state that training changes",
        hint="leave out blocking=False",
    )


class UserStore:
    """The user's own files. What we save beside them is in the records, never among the trainer's files.

    Of several ranks all call `save` and `load` with the same path, because the frameworks' own functions need that; one
    that writes on one rank returns at once on the others. All ranks must create the store; see `LedStore`. Random
    numbers and the data position are recorded for each. A save is assumed to need as much space as the one before. It
    cannot save in the background: the functions read the live state, and use the groups that training uses.
    """

    hashes_on_load = False

    def __init__(self, run: Run, files: UserFiles, settings: Settings, ranks: Ranks) -> None:
        self.series = files.check()
        self._run, self._name, self._ranks = run, files.name, ranks
        # Other ranks would wait for one that waits for space.
        self._settings = settings if ranks.size == 1 else settings.changed(on_full="error")
        self._size: int | None = None  # of the newest checkpoint, if known
        self.led = Led(
            ranks,
            save=lambda place, step: each(ranks, f"saving step {step}", lambda: files.save(place, step)),
            load=lambda place: each(ranks, f"loading {place}", lambda: files.load(place)),
            extra=lambda saved: part_of_rank(ranks, saved),
        )

    def prepare(self, step: int, extra: Mapping[str, Any], *, copy: bool = False, full: bool = True) -> PreparedSave:
        if copy:
            raise cannot_copy()
        path = self._name.format(step=step)
        return PreparedSave(path=path, write=lambda _: self._write(path, step, extra))

    def read(self, manifest: Manifest) -> Extra:
        """Raise RanksError if a rank could not load it."""
        self.led.on_all("load", self._run.usable(manifest.path))
        saved = self._read_beside(manifest)
        if self._ranks.size == 1 and "ranks" not in saved:
            return saved
        extra: Extra = self.led.on_all("extra", saved.get("ranks", []))
        return extra

    def _write(self, path: str, step: int, extra: Mapping[str, Any]) -> None:
        """Raise RanksError with the ranks that could not do their part."""
        own = together(self._ranks, f"saving step {step}", lambda: encode_state(dict(extra), path="extra"))
        encoded = own[0] if self._ranks.size == 1 else encode_state({"ranks": own}, path="extra")
        self.led.lead(functools.partial(self._write_led, path, step, encoded, extra.get("metrics")))

    def _write_led(self, path: str, step: int, encoded: Any, metrics: Mapping[str, float] | None) -> None:
        text = to_text({"ckptguard_state": 1, "step": step, "extra": encoded, "check": _check(encoded)})
        view = RunView(self._run, self._settings)
        self._need_room(view, path)
        make_room(view, path)
        id = history_of_series(self._run, self.series).next_id(self.series, step)
        place = self._run.usable(path)
        if metrics:
            write_metrics(self._run, id, metrics)
        if self._run.storage.root is not None:
            os.makedirs(os.path.dirname(place), exist_ok=True)
        try:
            self.led.on_all("save", place, step)
        except BaseException:
            if metrics:
                forget_metrics(self._run, id)
            with contextlib.suppress(OSError, StorageError):
                remove_half_save(self._run, path)  # its name was free before
            raise
        self._size = self._size_of_saved(view, path, step)
        for number in range(1, 1000):
            # An existing record belongs to an earlier save of this generation, of which nothing else is left.
            with contextlib.suppress(ObjectExistsError):
                create_record(self._run, f"{_beside(path, id)}{number:04d}.json", text)
                break

    def _size_of_saved(self, view: RunView, path: str, step: int) -> int:
        """Return the bytes of what `save` wrote. Raises StateError unless it is the checkpoint of this step."""
        place = self._run.usable(path)
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
        return found.bytes

    def _read_beside(self, manifest: Manifest) -> Extra:
        """Return what was recorded beside a checkpoint; nothing if that is not known."""
        prefix = _beside(manifest.path, manifest.id)
        folder, _, start = prefix.rpartition("/")
        names = sorted(n for n in list_records(self._run, folder) if n.startswith(start) and n.endswith(".json"))
        text = read_record(self._run, f"{folder}/{names[-1]}") if names else None
        if text is None:
            _log.warning("nothing is recorded beside %s: the data epoch starts again", manifest.path)
            return {}
        try:
            state = from_text(text)
            extra = decode_state(state["extra"])
            if not isinstance(extra, dict) or state.get("check", "") not in ("", _check(state["extra"])):
                raise StateError("it differs from what was recorded")
        except (StateError, KeyError, TypeError, AttributeError) as error:
            why = "what is recorded beside %s cannot be used, so the data epoch starts again: %s"
            _log.warning(why, manifest.path, error)
            return {}
        return extra

    def _need_room(self, view: RunView, path: str) -> None:
        if self._run.storage.root is None:
            return  # nothing reports the free space there
        if self._size is None:
            with contextlib.suppress(CouldNotTellError):
                own = [c for c in view.checkpoints if c.series == self.series]
                self._size = max(own, key=lambda c: numbers_of(c.step)).bytes if own else None
        if self._size is not None:
            what = f"{path}, if it is as large as the one before"
            room_for(view, self._size, what, wait=self._settings.on_full == "wait")


def _beside(path: str, id: CheckpointId) -> str:
    """Return the common prefix of the records beside a checkpoint."""
    return f"training/{series_folder(path)}.{id.generation}."


def _check(encoded: Any) -> str:
    """Return a checksum: the record has none, and there is no other copy of its content."""
    return f"{zlib.crc32(to_text(encoded)):08x}"
