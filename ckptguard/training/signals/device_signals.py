"""Read numbers from a device without making training wait for them; also the loss scale, which is often one of them.

Every update's numbers are copied into a block on the device, with one asynchronous copy each. A full block is copied
to pinned host memory in the background, and read once it has arrived. So a sickness is seen some updates late, but with
the step at which it began. Before a save, `flush` waits for everything in flight, but not forever: numbers of a device
that does not answer count as not reported, until it answers again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ckptguard.decisions.health import Signal
from ckptguard.training.signals.read_number import NoAnswerError, UnreadableError, aside
from ckptguard.values.own_log import log as _log

Numbers = tuple[Any, Any, Any, Any]  # loss, gradient norm, loss scale, skipped
_Key = tuple[int, Any]  # a class of tensors, by identity, and a device
_NAMES = ("loss", "grad_norm", "loss scale", "skipped")
_SECONDS = 60.0  # for a device to answer
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


def scaler_in_use() -> Any:
    """Return a gradient scaler of torch that scales a loss in this process, or None. It looks at every object, which
    takes some tenths of a second."""
    import gc

    import torch

    for held in gc.get_objects():
        if issubclass(type(held), torch.amp.GradScaler) and held.is_enabled() and held._scale is not None:
            return held
    return None


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

    # Explicit, because a default device may be set.
    return torch.empty(count, dtype=dtype, device="cpu", pin_memory=torch.accelerator.is_available())


class DeviceSignals:
    """Signals on their way from devices, oldest first. A block holds `every` updates. Nothing here raises.

    A device gets `seconds` to answer. `say(name, kind, error)` is called for a number that cannot be read.
    """

    def __init__(
        self,
        say: Callable[[str, type, Exception], None],
        *,
        every: int = 16,
        mark: Callable[[Any], Any] = record_event,
        seconds: float = _SECONDS,
    ) -> None:
        self._say, self._every, self._mark, self._seconds = say, every, mark, seconds
        self._filling: _Block | None = None
        self._sent: deque[_Block] = deque()
        self._free: list[_Block] = []
        self._stuck: dict[_Key, Any] = {}  # devices that did not answer, and the event that they must reach first

    @property
    def waiting(self) -> bool:
        """True if there are unread signals."""
        return self._filling is not None or bool(self._sent)

    def put(self, step: int, numbers: Numbers) -> None:
        """Take what was read of an update: floats, tensors on a device, or None."""
        block = self._filling
        if block is None:
            block = self._filling = self._free.pop() if self._free else _Block()
        row = len(block.rows)
        block.rows.append((step, [value if type(value) is float else None for value in numbers]))
        for place, value in enumerate(numbers):
            if value is not None and type(value) is not float:
                self._copy(block, row, place, value)
        if len(block.rows) == self._every:
            self._send()

    def ready(self, *, wait: bool = False) -> list[Signal]:
        """Return what has arrived. With `wait` return everything sent; else wait only for a device that is many blocks
        behind."""
        found: list[Signal] = []
        while self._sent and not _is_capturing():
            block = self._sent[0]
            if False in self._for_each_lane(block, _Lane.arrived):
                if not wait and len(self._sent) <= _MOST_BLOCKS:
                    break
                self._for_each_lane(block, self._wait_for)
            self._sent.popleft()
            found += block.read()
            self._free.append(block)
        return found

    def flush(self) -> list[Signal]:
        """Return everything so far, and wait for the devices."""
        if self._filling is not None:
            self._send()
        return self.ready(wait=True)

    def forget(self) -> None:
        """Drop everything in flight."""
        self._filling = None
        self._sent.clear()

    def _copy(self, block: _Block, row: int, place: int, value: Any) -> None:
        """Begin to copy a number into its cell."""

        def copy() -> None:
            key = id(type(value)), value.device
            if key in self._stuck:
                if not self._stuck[key].query():
                    raise NoAnswerError("its device does not answer")
                del self._stuck[key]
            lane = block.lanes.get(key)
            if lane is None:
                lane = block.lanes[key] = _Lane(key, value, self._every * len(_NAMES))
            lane.add(value, row, place)

        try:
            if _is_capturing():
                raise UnreadableError("a CUDA graph is being captured")
            _run(type(value), copy)
        except Exception as error:
            self._say(_NAMES[place], type(value), error)

    def _send(self) -> None:
        block = self._filling
        assert block is not None
        self._for_each_lane(block, lambda lane: lane.send(self._mark))
        self._sent.append(block)
        self._filling = None

    def _wait_for(self, lane: _Lane) -> None:
        if lane.key in self._stuck and not lane.arrived():
            raise NoAnswerError("its device does not answer")
        try:
            aside(lane.wait, self._seconds)
        except NoAnswerError:
            self._stuck[lane.key] = lane.event
            raise

    def _for_each_lane(self, block: _Block, work: Callable[[_Lane], Any]) -> list[Any]:
        """Return what it gives for each lane. The numbers of a lane for which it fails are lost."""
        found = []
        for key, lane in list(block.lanes.items()):
            try:
                found.append(work(lane))
            except Exception as error:
                del block.lanes[key]
                for place in {place for _, place in lane.used.values()}:
                    self._say(_NAMES[place], lane.kind, error)
        return found


class _Block:
    """The numbers of some updates: plain ones in `rows`, and one lane for each device."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, list[float | None]]] = []
        self.lanes: dict[_Key, _Lane] = {}

    def read(self) -> list[Signal]:
        """Return the signals, whose lanes have all arrived. The block is empty then."""
        for lane in self.lanes.values():
            lane.read(self.rows)
        found = [
            Signal(step=step, loss=loss, grad_norm=norm, scale=scale, skipped=None if skip is None else skip != 0.0)
            for step, (loss, norm, scale, skip) in self.rows
        ]
        self.rows = []
        return found


class _Lane:
    """The numbers of one device in a block. Its memory on device and host is allocated once and reused."""

    def __init__(self, key: _Key, like: Any, size: int) -> None:
        import torch

        self.key, self.kind = key, type(like)
        self.event: Any = None
        self.used: dict[int, tuple[int, int]] = {}  # cell -> its place in the rows
        with torch.inference_mode(False):  # memory that is made there can be written only there
            self._device_memory = like.new_empty(size, dtype=torch.float32)
            self._host_memory = host_memory(size, torch.float32)
            self._cells = list(self._device_memory.unbind())

    def add(self, value: Any, row: int, place: int) -> None:
        cell = row * len(_NAMES) + place
        self._cells[cell].copy_(value, non_blocking=True)
        self.used[cell] = (row, place)

    def send(self, mark: Callable[[Any], Any]) -> None:
        if self.used:
            _run(self.kind, lambda: self._host_memory.copy_(self._device_memory, non_blocking=True))
            self.event = mark(self._device_memory.device)

    def arrived(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def read(self, rows: list[tuple[int, list[float | None]]]) -> None:
        numbers = self._host_memory.tolist() if self.used else []
        for cell, (row, place) in self.used.items():
            rows[row][1][place] = numbers[cell]
        self.event, self.used = None, {}


def _run(kind: type, work: Callable[[], Any]) -> Any:
    """Run work on tensors of a class. The code of a class that is not torch's runs aside, on the same stream."""
    import torch

    if kind is torch.Tensor:
        return work()
    stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None

    def on_stream() -> Any:
        if stream is not None:
            torch.accelerator.set_stream(stream)
        return work()

    return aside(on_stream)


def _is_capturing() -> bool:
    """True while a CUDA graph is captured: then no event may be asked, and a copy would become part of the graph."""
    import torch

    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
