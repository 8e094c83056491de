"""The state that torchdata's StatefulDataLoader keeps by itself, as plain values."""

from __future__ import annotations

import logging
import sys
from typing import Any

from ckptguard.errors import StateError
from ckptguard.training.content.tagged_json import encode_state

_log = logging.getLogger("ckptguard")
_TENSOR = "ckptguard_tensor"


def loader_state(loader: Any) -> Any:
    """What brings the loader's iterator back to where it is; None where it has no such state, or none that is exact:
    then the batches that were taken are drawn again and dropped."""
    if not _keeps_state(loader) or not _knows_its_samples(loader):
        return None
    try:
        plain = _plain(loader.state_dict())
        encode_state(plain, path="loader")
    except StateError as error:
        _log.warning("the loader's own state cannot be saved (%s): a rollback draws its batches again", error.message)
        return None
    return plain


def put_loader_back(loader: Any, state: Any) -> None:
    """The next ``iter(loader)`` goes on from there."""
    loader.load_state_dict(_live(state))


def forget_loader_state(loader: Any) -> None:
    """The next ``iter(loader)`` begins at the beginning."""
    if _keeps_state(loader):
        loader.load_state_dict({})


def _keeps_state(loader: Any) -> bool:
    """Whether it is torchdata's loader itself: one that another framework wraps fetches batches ahead."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    return (
        torchdata is not None
        and isinstance(loader, torchdata.StatefulDataLoader)
        and not hasattr(loader, "base_dataloader")
    )


def _knows_its_samples(loader: Any) -> bool:
    """Whether the order of its samples is part of its state, or always the same; else it would be shuffled anew."""
    from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

    if isinstance(loader.dataset, IterableDataset):
        return True
    batches, single = loader.batch_sampler, loader.sampler
    sampler = batches if batches is not None and not isinstance(batches, BatchSampler) else single
    if isinstance(sampler, SequentialSampler) or type(sampler).__module__.startswith("torchdata."):
        return True
    return callable(getattr(sampler, "state_dict", None))


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
