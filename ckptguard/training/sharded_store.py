"""Checkpoints of several ranks: every rank writes and hashes its shards, rank 0 seals once all have.

Our own layout's folder, with the files of torch.distributed.checkpoint in it: DDP, FSDP2 and whatever else its
state-dict functions know, loaded onto any number of ranks.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from ckptguard.errors import CkptguardError, RanksError, RecordsError, SettingsError, StateError
from ckptguard.layouts.own import LAYOUT, folder_name
from ckptguard.layouts.roles import assign_roles
from ckptguard.manifest import File, Manifest
from ckptguard.names import series_of
from ckptguard.operations.examine import manifest_file
from ckptguard.operations.seal import seal_written
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import Run
from ckptguard.scan import ScanOptions, scan_files
from ckptguard.storage.failures import translated
from ckptguard.training.own_layout import (
    STATE_FORMAT,
    as_stored,
    local_root,
    make_room,
    read_state,
    remove_leftovers,
    sync_folder,
    write_state,
)
from ckptguard.training.parts import Parts
from ckptguard.training.ranks import GlooRanks, together
from ckptguard.training.state_json import decode_state, encode_state, to_text
from ckptguard.training.stores import Extra, part_of_rank

_log = logging.getLogger("ckptguard")


class ShardedStore:
    """See `LedStore`; to be made by all ranks."""

    hashes_on_load = False  # rank 0 has it verified, and every rank then loads through torch

    def __init__(self, run: Run, parts: Parts, ranks: GlooRanks) -> None:
        self._run, self._parts, self._ranks = run, parts, ranks
        self.series = series_of(folder_name(1))
        self._root = local_root(run)
        self._check_visible()
        if ranks.rank == 0:
            remove_leftovers(run)

    def write(self, step: int, extra: Mapping[str, Any]) -> str:
        """See `Store`. RanksError names the ranks that could not do their part; then nothing is left of it."""
        name = folder_name(step)
        temporary = str(self._ranks.tell(f"tmp-{name}-{uuid.uuid4().hex[:8]}"))
        try:
            told = together(self._ranks, f"saving step {step}", lambda: encode_state(dict(extra), path="extra"))
            self._save_shards(step, temporary)
            found = together(self._ranks, f"saving step {step}", lambda: self._own_files(temporary, name))
            files = [msgspec.convert(file, File, strict=False) for own in found for file in own]
            together(self._ranks, f"sealing step {step}", lambda: self._seal(step, temporary, files, told))
        finally:
            if self._ranks.rank == 0:
                shutil.rmtree(os.path.join(self._root, temporary), ignore_errors=True)
        return name

    def read(self, manifest: Manifest) -> tuple[Extra, str | None]:
        """See `Store`. RanksError or StateError if a rank could not load it."""
        self._ranks.tell(["load", manifest.step, manifest.generation])
        return self._load(manifest), None

    def finish(self, answer: object) -> None:
        """See `LedStore`."""
        self._ranks.tell(["end", answer])

    def follow(self) -> tuple[Any, Extra]:
        """See `LedStore`."""
        extra: Extra = {}
        while True:
            order, *rest = self._ranks.tell(None)
            if order == "end":
                return rest[0], extra
            try:
                manifest = read_manifest(self._run, self.series, *rest)
                if manifest is None:
                    raise RecordsError(f"rank {self._ranks.rank} sees no manifest of step {rest[0]}")
            except CkptguardError as error:
                self._ranks.gather([None, error.message])  # rank 0 is in `_load`, and names us
                continue
            try:
                extra = self._load(manifest)
            except CkptguardError as error:
                _log.warning("%s", error.message)  # rank 0 has it too, and decides

    def _save_shards(self, step: int, temporary: str) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        from ckptguard.training.dcp_writer import HashingWriter

        self._writer = HashingWriter(os.path.join(self._root, temporary))
        try:
            live = self._live_of_all(f"saving step {step}", with_optimizer=self._has_stepped())
            save(live, storage_writer=self._writer, process_group=self._ranks.group)
        except CkptguardError:
            raise
        except Exception as error:  # torch tells every rank what went wrong on which
            raise RanksError(f"step {step} could not be saved: {_first_line(error)}") from error

    def _has_stepped(self) -> bool:
        """Whether the optimizer has a state; torch would make one by stepping it, and not the one of an uninterrupted
        training."""
        optimizer = self._parts.optimizer
        return self._ranks.any(optimizer is not None and bool(optimizer.state))

    def _live(self, *, with_optimizer: bool) -> dict[str, Any]:
        """The tensors of model and optimizer that lie on this rank, by names that all ranks share."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        live: dict[str, Any] = {"model": get_model_state_dict(self._parts.model)}
        if with_optimizer and self._parts.optimizer is not None:
            live["optimizer"] = get_optimizer_state_dict(self._parts.model, self._parts.optimizer)
        return live

    def _live_of_all(self, what: str, *, with_optimizer: bool) -> dict[str, Any]:
        """What `_live` gives, once every rank has its own: none may wait in torch for one that has not."""
        live: list[dict[str, Any]] = []
        together(self._ranks, what, lambda: live.append(self._live(with_optimizer=with_optimizer)))
        return live[0]

    def _own_files(self, temporary: str, name: str) -> list[Any]:
        """This rank's files, read back: what the storage has must be what was hashed while it was written."""
        digests = self._writer.digests
        keys = [f"{temporary}/{file}" for file in sorted(digests)]
        scan = scan_files(self._run.storage, keys, ScanOptions(md5=False, sums=("blake3",), workers=1))
        files = []
        for scanned in scan.files:
            file = scanned.entry.key.removeprefix(temporary + "/")
            if scanned.sums["blake3"] != digests[file]:
                raise StateError(f"{file} was not stored as it was written")
            key = f"{name}/{file}"
            roles = assign_roles(key, scanned.structure.tensors, containers=scanned.structure.containers)
            sealed = manifest_file(scanned, tuple(roles))
            files.append(msgspec.to_builtins(msgspec.structs.replace(sealed, path=key)))
        return files

    def _seal(self, step: int, temporary: str, files: list[File], extras: list[Any]) -> None:
        if self._ranks.rank != 0:
            return
        name, folder = folder_name(step), os.path.join(self._root, temporary)
        optimizer = self._parts.optimizer
        state: dict[str, Any] = {"ckptguard_state": STATE_FORMAT, "step": step, "world_size": self._ranks.size}
        state["ranks"] = extras
        for part, value in (("scheduler", self._parts.scheduler), ("scaler", self._parts.scaler)):
            if value is not None:
                state[part] = encode_state(value.state_dict(), path=part)
        if optimizer is not None and not optimizer.state:
            state["optimizer"] = encode_state(optimizer.state_dict(), path="optimizer")
        written = [*files, write_state(folder, name, to_text(state))]
        sync_folder(folder)
        make_room(self._run, name)
        self._run.storage.move(temporary, name)
        try:
            stored = tuple(as_stored(self._run, file) for file in sorted(written, key=lambda f: f.path))
            seal_written(self._run, path=name, layout=LAYOUT.name, step=step, files=stored)
        except Exception:
            self._run.storage.remove(name)  # without its manifest it would never be good
            raise

    def _load(self, manifest: Manifest) -> Extra:
        """Load a checkpoint that was verified, on all ranks at once."""
        what = f"loading {manifest.path}"
        states: list[dict[str, Any]] = []
        together(self._ranks, what, lambda: states.append(_intact(*read_state(self._run, manifest))))
        [state] = states
        live = self._live_of_all(what, with_optimizer="optimizer" not in state)
        self._load_shards(manifest.path, live)
        together(self._ranks, what, lambda: self._put_back(state, live))
        return part_of_rank(self._ranks, state["ranks"])

    def _load_shards(self, path: str, live: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(os.path.join(self._root, path))
        try:
            load(live, storage_reader=reader, process_group=self._ranks.group)
        except Exception as error:  # torch tells every rank what went wrong on which
            raise RanksError(f"{path} could not be loaded: {_first_line(error)}") from error

    def _put_back(self, state: Mapping[str, Any], live: Mapping[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        model, optimizer = self._parts.model, self._parts.optimizer
        set_model_state_dict(model, live["model"])
        if "optimizer" in live:
            set_optimizer_state_dict(model, optimizer, live["optimizer"])
        elif optimizer is not None:
            optimizer.load_state_dict(decode_state(state["optimizer"]))
        for name, part in (("scheduler", self._parts.scheduler), ("scaler", self._parts.scaler)):
            if part is not None:
                if name not in state:
                    raise StateError(f"the checkpoint holds no state of the {name}")
                part.load_state_dict(decode_state(state[name]))

    def _check_visible(self) -> None:
        """SettingsError on every rank unless all see the folder that rank 0 sees."""
        name = str(self._ranks.tell(f"tmp-visible-{uuid.uuid4().hex}"))
        place = os.path.join(self._root, name)
        try:
            together(self._ranks, "writing to the run", lambda: _touch(place) if self._ranks.rank == 0 else None)
            blind = [rank for rank, sees in enumerate(self._ranks.gather(os.path.exists(place))) if not sees]
        finally:
            if self._ranks.rank == 0 and os.path.exists(place):
                os.unlink(place)
        if blind:
            raise SettingsError(
                f"the run {self._run.url} of rank 0 is not that of ranks {blind}",
                hint="it must lie on storage that all ranks share",
            )


def _intact(state: dict[str, Any], wrong: str | None) -> dict[str, Any]:
    if wrong is not None:
        raise StateError(wrong)
    return state


def _touch(place: str) -> bool:
    with translated("", place):
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    return True


def _first_line(error: Exception) -> str:
    """What torch says, with the ranks it names, without their stacks."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        return "; ".join(f"rank {rank}: {trouble[0]!r}" for rank, trouble in failures.items())
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
