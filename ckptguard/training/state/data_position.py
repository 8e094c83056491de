"""The position of training in its data, and how to return to it, for a DataLoader or anything re-iterable.

A draw is one ``next`` of the loader's iterator. The position is the epoch and the number of its draws. To return, the
generators are set as they were when the epoch began, and a new iterator is made. The earlier draws are drawn again and
dropped. A loader with its own state (torchdata's StatefulDataLoader) is set to it instead, and draws nothing again.
Draws in `skipped` are always dropped.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

from ckptguard.errors import SettingsError, StateError
from ckptguard.training.content.tagged_json import encode_state
from ckptguard.training.state.rng import capture_rng, generator_bytes, generator_tensor, restore_rng, same_rng
from ckptguard.values.own_log import log as _log

Draw = tuple[int, int]
_TENSOR = "ckptguard_tensor"


class DataPosition:
    """Draws batches from a loader and knows which. `epoch` counts from 0, `taken` within the epoch.

    `inexact` says why the last `restore` may give other batches.
    """

    def __init__(self, loader: Any) -> None:
        # Not by iter(loader): for a DataLoader that draws a seed and starts workers.
        if hasattr(type(loader), "__next__"):
            raise SettingsError(
                f"the loader is a one-shot iterator ({type(loader).__name__}): training could not go back in it",
                hint="pass the DataLoader (or list) itself, not iter(...) or a generator",
            )
        if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
            raise SettingsError(f"the loader is a {type(loader).__name__}, which cannot be iterated")
        self.loader = loader
        self.epoch = 0
        self.taken = 0
        self.skipped: set[Draw] = set()
        self.inexact: str | None = None
        self._iterator: Iterator[Any] | None = None
        self._before: Iterator[Any] | None = None  # the iterator before a rollback
        self._epoch_start: dict[str, Any] = {}

    def draw(self) -> tuple[Any, Draw]:
        """Return the next batch that is not skipped, and its draw. Epochs follow each other without end."""
        while True:
            if self._iterator is None:
                self._begin_epoch()
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                if not self.taken:
                    hint = "iter(loader) must start from the beginning each time" if self.epoch else None
                    raise SettingsError("the loader yields no batches", hint=hint) from None
                self.epoch, self.taken, self._iterator = self.epoch + 1, 0, None
                continue
            draw = (self.epoch, self.taken)
            self.taken += 1
            if draw not in self.skipped:
                return batch, draw

    def state(self) -> dict[str, Any]:
        """Return everything needed to come back here, as plain values."""
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "skipped": sorted(self.skipped),
            "length": _length(self.loader),
            "begun": self._iterator is not None,
            "loader": _loader_state(self.loader) if self._iterator is not None else None,
            "epoch_start": self._epoch_start if self._iterator is not None else {"generators": self._own_states()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a position. Restore the random number generators after this, because drawing changes them.

        Draws that are skipped now stay skipped.
        """
        self._shut_down()
        was = self.epoch, self.taken
        self.epoch, self.taken = state["epoch"], 0
        self.inexact = None
        self.skipped |= {(epoch, index) for epoch, index in state["skipped"]}
        length, was_long = _length(self.loader), state["length"]
        if length != was_long:
            differs = "the loader has %s batches, and had %s when this was saved: the position in the data may differ"
            _log.warning(differs, length, was_long)
        generators, saved = _generators(self.loader), state["epoch_start"]["generators"]
        if len(saved) != len(generators):
            raise StateError(
                f"the loader has {len(generators)} generators of its own, and had {len(saved)} when this was saved"
            )
        for generator, text in zip(generators, saved, strict=True):
            generator.set_state(generator_tensor(text))
        _forget_loader_state(self.loader)
        if not state["begun"]:
            return
        if state.get("loader") is not None:
            self.loader.load_state_dict(_live(state["loader"]))  # the next iter(loader) continues from there
            self._epoch_start, self.taken = state["epoch_start"], state["taken"]
            self._tell_epoch()
            self._iterator = iter(self.loader)
            return
        restore_rng(state["epoch_start"]["rng"])
        self._begin_epoch()
        assert self._iterator is not None
        keeps_workers = getattr(self.loader, "persistent_workers", False)
        if self._iterator is self._before and not keeps_workers:
            self._say("iter(loader) returns the same iterator every time: it continues where it was")
            self.epoch, self.taken = was
            return
        if keeps_workers:
            self._say("the loader keeps its workers (persistent_workers): their random numbers are not restored")
        before = capture_rng()
        for _ in itertools.islice(self._iterator, state["taken"]):
            self.taken += 1
        if _is_stream(self.loader) and not same_rng(before, capture_rng()):
            self._say("the loader uses the same generators as training: its order depends on both")

    def restart_epoch(self) -> None:
        """Start the epoch again, if nothing better is known."""
        self._shut_down()
        _forget_loader_state(self.loader)
        self.taken = 0

    def _tell_epoch(self) -> None:
        for sampler in _samplers(self.loader):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(self.epoch)

    def _begin_epoch(self) -> None:
        self._tell_epoch()
        # Before iter(): making the iterator of a DataLoader already draws a seed.
        self._epoch_start = {"rng": capture_rng(), "generators": self._own_states()}
        self._iterator = iter(self.loader)

    def _own_states(self) -> list[bytes]:
        return [generator_bytes(generator.get_state()) for generator in _generators(self.loader)]

    def _say(self, why: str) -> None:
        self.inexact = why
        _log.warning("training may continue with other data: %s", why)

    def _shut_down(self) -> None:
        # Kept until the next one is made, to compare the two; but not if it has processes of its own.
        self._before = None if hasattr(self.loader, "num_workers") else self._iterator
        self._iterator = None


def _is_stream(loader: Any) -> bool:
    """True if the next draws may depend on earlier draws."""
    from torch.utils.data import IterableDataset

    return not hasattr(loader, "dataset") or isinstance(loader.dataset, IterableDataset)


def _samplers(loader: Any) -> list[Any]:
    """Return the loader and all its samplers, also those inside samplers that shard for ranks; each once."""
    found: dict[int, Any] = {}
    waiting = [loader]
    while waiting:
        owner = waiting.pop(0)
        if owner is not None and id(owner) not in found:
            found[id(owner)] = owner
            waiting += [getattr(owner, name, None) for name in ("sampler", "batch_sampler")]
    return list(found.values())


def _generators(loader: Any) -> list[Any]:
    """Return the torch generators that the loader and its samplers own, each once."""
    import torch

    found = [getattr(owner, "generator", None) for owner in _samplers(loader)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _loader_state(loader: Any) -> Any:
    """Return the state that brings the loader's iterator back to its place, or None if it has no exact one.

    Without it, earlier batches are drawn again and dropped.
    """
    if not _keeps_state(loader) or not _knows_its_samples(loader):
        return None
    try:
        plain = _plain(loader.state_dict())
        encode_state(plain, path="loader")
    except StateError as error:
        _log.warning("the loader's own state cannot be saved (%s): a rollback draws its batches again", error.message)
        return None
    return plain


def _forget_loader_state(loader: Any) -> None:
    """Make the next ``iter(loader)`` start at the beginning."""
    if _keeps_state(loader):
        loader.load_state_dict({})


def _keeps_state(loader: Any) -> bool:
    """True if it is torchdata's loader itself. Wrapped by another framework, it fetches batches ahead."""
    kind = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    return kind is not None and isinstance(loader, kind) and not hasattr(loader, "base_dataloader")


def _knows_its_samples(loader: Any) -> bool:
    """True if the order of its samples is in its state, or always the same. Otherwise it would be shuffled again."""
    from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

    if isinstance(loader.dataset, IterableDataset):
        return True
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None or isinstance(batches, BatchSampler) else batches
    keeps_state = callable(getattr(sampler, "state_dict", None)) or type(sampler).__module__.startswith("torchdata.")
    return keeps_state or isinstance(sampler, SequentialSampler)


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, list(value.shape), value.detach().cpu().reshape(-1).tolist()]}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def _live(value: Any) -> Any:
    import torch

    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            dtype, shape, numbers = value[_TENSOR]
            return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)
        return {key: _live(item) for key, item in value.items()}
    return type(value)(map(_live, value)) if type(value) in (list, tuple) else value
