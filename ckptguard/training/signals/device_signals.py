"""Read numbers from a device without making training wait for them; also the loss scale, which is often one of them.

Every update's numbers are copied into a block on the device, with one asynchronous copy each. A full block is copied
to pinned host memory in the background, and read once it has arrived. So a sickness is seen some updates late, but with
the step at which it began. Before a save, `flush` waits for everything in flight.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from ckptguard.decisions.health import Signal

_log = logging.getLogger("ckptguard")
_NUMBERS = 3  # loss, gradient norm, loss scale
_MOST_BLOCKS = 8  # a device that is further behind is waited for: training cannot be ahead forever


def on_device(value: Any) -> bool:
    """True if reading this number would wait for a device."""
    return getattr(value, "is_cpu", True) is False


def loss_scale(scaler: Any) -> Any:
    """Return the scale of a scaler with torch's interface: a float, or a tensor on a device. None without an enabled
    one."""
    if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
        return None
    # get_scale() reads the device, and training would wait for it at every update.
    tensor: Any = getattr(scaler, "_scale", None)
    return tensor.detach().reshape(()) if on_device(tensor) else float(scaler.get_scale())


def raise_loss_scale(scaler: Any, lowest: float) -> None:
    """Raise a collapsed scale to `lowest`, through the scaler's own state. A higher one stays as it is."""
    if loss_scale(scaler) is None or scaler.get_scale() >= lowest:
        return
    state = scaler.state_dict()
    if "scale" in state:  # otherwise another kind of scaler
        _log.warning("raising the loss scale from %s to %s", state["scale"], lowest)
        scaler.load_state_dict({**state, "scale": lowest})


def record_event(device: Any) -> Any:
    """Mark this moment in the device's work. The mark can be queried without waiting (`query`), or waited for."""
    import torch

    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))  # otherwise it would be the current device's stream
    return event


def host_memory(count: int, dtype: Any) -> Any:
    """Return memory into which a device can copy in the background, if there is such memory."""
    import torch

    return torch.empty(count, dtype=dtype, pin_memory=torch.accelerator.is_available())


class DeviceSignals:
    """Signals on their way from the device, oldest first. A block holds `every` updates."""

    def __init__(self, *, every: int = 16, mark: Callable[[Any], Any] = record_event) -> None:
        self._every, self._mark = every, mark
        self._filling: _Block | None = None
        self._sent: deque[_Block] = deque()
        self._free: list[_Block] = []

    @property
    def waiting(self) -> bool:
        """True if there are unread signals."""
        return self._filling is not None or bool(self._sent)

    def put(self, step: int, numbers: tuple[Any, Any, Any], skipped: bool | None) -> None:
        """Take the (loss, gradient norm, loss scale) of an update: floats, tensors on a device, or None."""
        block = self._filling
        if block is None:
            block = self._filling = self._free.pop() if self._free else _Block(self._every)
        block.add(step, numbers, skipped)
        if len(block.rows) == self._every:
            self._send()

    def ready(self, *, wait: bool = False) -> list[Signal]:
        """Return what has arrived. With `wait` return everything sent; else wait only for a device that is many blocks
        behind."""
        found: list[Signal] = []
        while self._sent and (wait or self._sent[0].arrived() or len(self._sent) > _MOST_BLOCKS):
            block = self._sent.popleft()
            found += block.read()
            self._free.append(block)
        return found

    def flush(self) -> list[Signal]:
        """Return everything so far, and wait for the device."""
        if self._filling is not None:
            self._send()
        return self.ready(wait=True)

    def forget(self) -> None:
        """Drop everything in flight."""
        self._filling = None
        self._sent.clear()

    def _send(self) -> None:
        assert self._filling is not None
        self._filling.send(self._mark)
        self._sent.append(self._filling)
        self._filling = None


class _Block:
    """The numbers of some updates. Its memory on device and host is allocated once and reused."""

    def __init__(self, rows: int) -> None:
        self._size = rows * _NUMBERS
        self.rows: list[tuple[int, list[float | None], bool | None]] = []
        self._cells: list[Any] = []
        self._device_memory: Any = None
        self._host_memory: Any = None
        self._event: Any = None
        self._used: dict[int, tuple[int, int]] = {}  # cell -> its place in `rows`

    def add(self, step: int, numbers: tuple[Any, Any, Any], skipped: bool | None) -> None:
        row = len(self.rows)
        known: list[float | None] = [None] * _NUMBERS
        for place, value in enumerate(numbers):
            if on_device(value):
                if self._device_memory is None:
                    self._make_memory(value)
                cell = row * _NUMBERS + place
                self._cells[cell].copy_(value, non_blocking=True)
                self._used[cell] = (row, place)
            else:
                known[place] = value
        self.rows.append((step, known, skipped))

    def send(self, mark: Callable[[Any], Any]) -> None:
        if self._used:
            self._host_memory.copy_(self._device_memory, non_blocking=True)
            self._event = mark(self._device_memory.device)

    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> list[Signal]:
        if self._event is not None:
            self._event.synchronize()
            numbers = self._host_memory.tolist()
            for cell, (row, place) in self._used.items():
                self.rows[row][1][place] = numbers[cell]
        found = [
            Signal(step=step, loss=loss, grad_norm=norm, scale=scale, skipped=skipped)
            for step, (loss, norm, scale), skipped in self.rows
        ]
        self.rows, self._used, self._event = [], {}, None
        return found

    def _make_memory(self, value: Any) -> None:
        import torch

        self._device_memory = value.new_empty(self._size, dtype=torch.float32)
        self._host_memory = host_memory(self._size, torch.float32)
        self._cells = list(self._device_memory.unbind())
