"""One save of several ranks: planned by all, written and hashed by each, sealed by rank 0 once all have written.

It also holds model and optimizer as torch.distributed.checkpoint sees them, under names that all ranks share.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from ckptguard.errors import CkptguardError, RanksError, SickTrainingError, StateError
from ckptguard.layouts.own import folder_name
from ckptguard.layouts.roles import assign_roles
from ckptguard.runs.run_view import RunView
from ckptguard.scan import ScanOptions, scan_files
from ckptguard.training.content.host_copy import HostCopy
from ckptguard.training.content.tagged_json import decode_state, encode_state, to_text
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.ranks import GlooRanks, Ranks, each, together
from ckptguard.training.saving.destinations import LocalFolder, SaveTurn, room_for, settle, temporary_name
from ckptguard.training.saving.own_layout import STATE_FORMAT, write_state
from ckptguard.training.sharded.dcp_plan import HashingWriter, LastPlan, Planned, from_words, in_words
from ckptguard.training.signals.weights import first_of
from ckptguard.values.manifest import File
from ckptguard.verification.collect_evidence import manifest_file

_log = logging.getLogger("ckptguard")


class ShardedSave:
    """All ranks create it at once and agree on what each writes: one rank writes a tensor that several hold.

    RanksError names the ranks that failed. After any failure nothing of it is left.
    """

    def __init__(
        self, view: RunView, parts: TrainingParts, ranks: GlooRanks, last: LastPlan, step: int, extra: Mapping[str, Any]
    ) -> None:
        self._view, self._step = view, step
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
        has_stepped = ranks.any(parts.optimizer is not None and bool(parts.optimizer.state))
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
        if parts.optimizer is not None and not parts.optimizer.state:
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
        settle(self._view, place.commit(files, self._metrics), turn)
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

    model, optimizer = parts.model, parts.optimizer
    set_model_state_dict(model, live["model"], options=StateDictOptions(strict=parts.strict))
    if "optimizer" in live:
        set_optimizer_state_dict(model, optimizer, live["optimizer"])
    elif optimizer is not None:
        optimizer.load_state_dict(decode_state(state["optimizer"]))
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
