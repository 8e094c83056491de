"""Notify people of each event once, by a command, a webhook or apprise.

Each channel has its own thread, so that nothing here blocks the loop. Records say which event reached which channel. At
its start a daemon sends the recorded events that reached nobody, because the process that found them was killed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from ckptguard.errors import CkptguardError, RunRemovedError, SettingsError
from ckptguard.records.notified import mark_notified, read_notified, skip_notifications
from ckptguard.records.run import Run, has_records
from ckptguard.records.silences import silence_now
from ckptguard.reporting.channels import (
    COMMAND_SECONDS,
    Channel,
    CommandChannel,
    Context,
    Event,
    NotDeliveredError,
    channels_of,
    require_apprise,
)
from ckptguard.reporting.events import events_on_record
from ckptguard.runs.run_view import RunView
from ckptguard.values.settings import Settings
from ckptguard.values.silence import Silence

# What a `close` that waits for all that is told needs for one command, and a little more.
LONGEST_CLOSE = COMMAND_SECONDS + 5.0
_MOST_WAITING = 1000
_MOST_SENT_LATE = 20  # events of the past that one start tells
_ANSWER = 5.0  # seconds for a run's storage to say whether it is silenced
_TRIES, _FIRST_PAUSE = 10, 1.0  # seconds; each pause is twice the one before: nine minutes in all
_TRIES_AT_END = 3  # of one event, once a `close` waits; if they fail, what is left is left to the next start

Log = Callable[..., None]  # log(event, *, level="info", **fields)


class Hooks:
    """Sends each event to every channel of the settings. Results and failures are logged to `log`.

    A command is started within `around_start`, for callers that block signals.
    """

    def __init__(self, settings: Settings, log: Log, around_start: Context = contextlib.nullcontext) -> None:
        self.log = log
        try:
            require_apprise(settings)
        except SettingsError as error:  # verifying is worth more than telling
            log("hook_missing", level="error", hook="notify", reason=f"{error.message}: {error.hint}")
            settings = settings.changed(notify=())
        self._lines = [_Line(channel, log, self._mark) for channel in channels_of(settings, around_start)]

    def begin(self, view: RunView) -> None:
        """Tell what is on record and never reached a channel. One that is new begins with what comes. Never raises."""
        if not self._lines:
            return
        try:
            if has_records(view.run) or view.checkpoints:  # a folder of ours in an empty run would be in the way
                self._send_missed(view)
        except RunRemovedError:
            pass
        except Exception as error:
            reason = error.message if isinstance(error, CkptguardError) else f"{type(error).__name__}: {error}"
            self.log("hook_records", level="warning", run=view.run.url, reason=reason)

    def tell(self, run: Run | None, event: Event) -> None:
        """Queue an event of a run; returns at once. What it reached is noted, and not told again."""
        for line in self._lines:
            line.put(run, event)

    def tell_once(self, run: Run, event: Event) -> None:
        """Queue an event that another process may have told before."""
        try:
            notified = read_notified(run) if self._lines else {}
        except CkptguardError:
            notified = {}
        for line in self._lines:
            if event["id"].rpartition(".")[2] not in notified.get(line.channel.key, ()):
                line.put(run, event)

    @property
    def pids(self) -> list[int]:
        """The command, while it runs; also one that is being started now."""
        return [pid for line in self._lines if isinstance(line.channel, CommandChannel) for pid in line.channel.pids]

    def end(self) -> None:
        """End after what is queued. Returns at once."""
        for line in self._lines:
            line.end()

    @property
    def has_ended(self) -> bool:
        """True if nothing is told any more."""
        return all(line.has_ended for line in self._lines)

    def close(self, *, timeout: float) -> None:
        """Wait at most `timeout` seconds for what is queued, then leave it to the next start."""
        deadline = time.monotonic() + timeout
        self.end()
        for line in self._lines:
            line.close(deadline)

    def _send_missed(self, view: RunView) -> None:
        events, notified = events_on_record(view), read_notified(view.run)
        for line in self._lines:
            channel = line.channel.key
            if channel not in notified:
                skip_notifications(view.run, channel, events)
                continue
            missed = [key for key in events if key not in notified[channel]]
            if len(missed) > _MOST_SENT_LATE:
                skip_notifications(view.run, channel, missed[:-_MOST_SENT_LATE])
            for key in missed[-_MOST_SENT_LATE:]:
                event = events[key]()
                if event is not None:
                    line.put(view.run, event)
                else:
                    mark_notified(view.run, channel, key)

    def _mark(self, channel: Channel, run: Run | None, event: Event) -> None:
        if run is not None and event["event"] in ("verdict", "incident", "unfinished"):
            try:
                mark_notified(run, channel.key, event["id"].rpartition(".")[2])
            except RunRemovedError:
                pass
            except CkptguardError as error:
                self.log("hook_records", level="warning", run=run.url, reason=error.message)


class HookSets:
    """The hooks of many runs: one set for each way of being told."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._sets: dict[object, Hooks] = {}
        self._ending: list[Hooks] = []

    def of(self, settings: Settings) -> Hooks:
        """Return the hooks that these settings ask for."""
        key = _hooks_key(settings)
        with self._lock:
            if key not in self._sets:
                self._sets[key] = Hooks(settings, self._log)
            return self._sets[key]

    def keep_only(self, used: Iterable[Settings]) -> None:
        """End the others, after what they still have to tell."""
        wanted = {_hooks_key(settings) for settings in used}
        with self._lock:
            for key in self._sets.keys() - wanted:
                hooks = self._sets.pop(key)
                hooks.end()
                self._ending.append(hooks)
            self._ending = [hooks for hooks in self._ending if not hooks.has_ended]

    def close(self, *, timeout: float) -> None:
        """Close all, at most `timeout` seconds in all."""
        deadline = time.monotonic() + timeout
        every = (*self._sets.values(), *self._ending)
        for hooks in every:
            hooks.end()
        for hooks in every:
            hooks.close(timeout=max(0.0, deadline - time.monotonic()))


def _hooks_key(settings: Settings) -> object:
    return settings.on_incident, settings.webhook, settings.notify


class _Line:
    """A queue with one thread that hands events to a channel one by one, and `mark`s those that arrived."""

    def __init__(self, channel: Channel, log: Log, mark: Callable[[Channel, Run | None, Event], None]) -> None:
        self.channel = channel
        self._mark = mark
        self._asking: threading.Thread | None = None
        self._log = partial(log, hook=channel.setting, to=channel.shown)
        self._events: queue.Queue[tuple[Run | None, Event] | None] = queue.Queue(_MOST_WAITING)
        self._closing, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"hook-{channel.setting}", daemon=True)
        self._thread.start()

    def put(self, run: Run | None, event: Event) -> None:
        try:
            self._events.put_nowait((run, event))
        except queue.Full:
            self._log("hook_event_dropped", level="error", about=event)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> None:
        """Have the thread end after what is queued, and soon where nothing arrives."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._events.put_nowait(None)

    def close(self, deadline: float) -> None:
        self._thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self._ending.set()
        if self._thread.is_alive():
            self._log("hook_abandoned", level="warning")
            self.channel.abandon()

    def _work(self) -> None:
        while (item := self._events.get()) is not None and not self._ending.is_set():
            if self._deliver(*item):
                self._mark(self.channel, *item)

    def _silence_of(self, run: Run) -> Silence | None:
        """Return what silences a run. A storage that does not answer in time silences nothing, nor the other runs."""
        if self._asking is not None and self._asking.is_alive():
            return None
        found: list[Silence | None] = []
        self._asking = threading.Thread(target=lambda: found.append(silence_now(run)), name="silence", daemon=True)
        try:
            self._asking.start()
        except RuntimeError:  # no more threads
            return None
        self._asking.join(_ANSWER)
        return found[0] if found else None

    def _deliver(self, run: Run | None, event: Event) -> bool:
        """Hand an event over. False if it is left to the next start. While its run is silenced, that is all."""
        pause, left = _FIRST_PAUSE, _TRIES
        while True:
            if run is not None and (silence := self._silence_of(run)) is not None:
                self._log("hook_silenced", run=run.url, about=event.get("id"), until=silence.until, by=silence.by)
                return True
            try:
                said = self.channel.deliver(event)
            except Exception as error:
                if self._closing.is_set():
                    pause, left = _FIRST_PAUSE, min(left, _TRIES_AT_END)
                left -= 1
                again = isinstance(error, NotDeliveredError) and error.again and left > 0
                reason = str(error) if isinstance(error, NotDeliveredError) else f"{type(error).__name__}: {error}"
                then = {"again_in_seconds": pause} if again else {}
                self._log("hook_failed", level="warning" if again else "error", reason=reason, **then)
                if not again:
                    if self._closing.is_set() and left == 0:
                        self._ending.set()
                    return False
                (self._ending if self._closing.is_set() else self._closing).wait(pause)
                if self._ending.is_set():
                    return False
                pause *= 2
            else:
                self._log("hook_ran", level="warning" if said.get("exit_code") else "info", **said)
                return True
