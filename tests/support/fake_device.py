"""Tensors that pretend to lie on a device, and count every time that somebody waits for it."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map

# What reads a number of the device: .item(), float(), bool(), tolist(), and a copy that is waited for.
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default}


class Device:
    """The device: `waits` is how often it was waited for, `done` whether it has done all it was given."""

    def __init__(self) -> None:
        self.waits = 0
        self.done = False

    def tensor(self, value, **options):
        """A tensor that lies here."""
        return OnDevice(torch.as_tensor(value, **options), self)

    def mark(self, _device):
        """What `record_event` does on a real device."""
        return Mark(self)


class Mark:
    """A mark in the device's work."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def query(self) -> bool:
        """Asking does not wait."""
        return self._device.done

    def synchronize(self) -> None:
        """Waiting does, unless there is nothing to wait for."""
        self._device.waits += not self._device.done


class OnDevice(torch.Tensor):
    """A tensor on a `Device`."""

    @staticmethod
    def __new__(cls, content, device):
        made = torch.Tensor._make_wrapper_subclass(
            cls, content.shape, dtype=content.dtype, requires_grad=content.requires_grad
        )
        made.content, made.owner = content.detach(), device
        return made

    @property
    def is_cpu(self) -> bool:
        """It is not."""
        return False

    def tolist(self):
        """Reading them all waits."""
        self.owner.waits += 1
        return self.content.tolist()

    def cpu(self):
        """A copy on the host waits."""
        self.owner.waits += 1
        return self.content

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = []
        tree_map(lambda value: found.append(value.owner) if isinstance(value, OnDevice) else None, (args, kwargs))
        device = found[0]
        if function in _READS:
            device.waits += 1
        to_host = function is torch.ops.aten.copy_.default and not isinstance(args[0], OnDevice)
        if to_host and not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
            device.waits += 1
        plain = tree_map(lambda value: value.content if isinstance(value, OnDevice) else value, (args, kwargs))
        result = function(*plain[0], **plain[1])
        if to_host:
            return args[0]
        return tree_map(lambda value: cls(value, device) if isinstance(value, torch.Tensor) else value, result)
