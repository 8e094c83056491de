"""What a guard is given, as values: how it saves, and how long it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckptguard.errors import SettingsError


class Guarded(Protocol):
    """What a TrainingGuard saves and puts back: a module, an optimizer, a scheduler, a scaler, or anything else with
    these two methods."""

    def state_dict(self) -> Any:
        """Return the state: a dict of tensors and plain values."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over a state that `state_dict` returned."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """How a TrainingGuard saves by itself.

    - `blocking=False`: a save copies the state to host memory, which needs room for one more copy. It is then written
      while training goes on, at most one at a time.
    - `when_busy`: the next save that is due meanwhile waits ("wait") or is left out ("skip"). The last save is never
      left out.
    - `optimizer_every`: of its own saves only each n-th holds the optimizer, and the last one. The others hold weights,
      and a rollback passes them over. Training repeats up to n times as many updates after one.
    - `replicas`: places for more copies of good checkpoints.
    """

    blocking: bool = True
    when_busy: str = "wait"
    optimizer_every: int = 1
    replicas: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.when_busy not in ("wait", "skip"):
            raise SettingsError(f'when_busy must be "wait" or "skip", not {self.when_busy!r}')
        if type(self.optimizer_every) is not int or not 1 <= self.optimizer_every <= 10**6:
            raise SettingsError(f"optimizer_every must be a whole number from 1 on, not {self.optimizer_every!r:.80}")


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How many seconds a TrainingGuard waits.

    - `daemon`: for the daemon to verify what is pending; then this process does it.
    - `ranks`: one rank for the others. Allow more than verifying and loading a checkpoint takes.
    """

    daemon: float = 30.0
    ranks: float = 600.0

    def __post_init__(self) -> None:
        for name in ("daemon", "ranks"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
                raise SettingsError(f"{name} of Deadlines must be a number of seconds, not {seconds!r:.80}")


def checked_option(name: str, value: object, kind: type) -> None:
    """SettingsError for an option that is not of its kind."""
    if not isinstance(value, kind):
        hint = f"such as {name}=ckptguard.{kind.__name__}(...)"
        raise SettingsError(f"{name} must be a {kind.__name__}, not {value!r:.80}", hint=hint)


def asks_daemon(daemon: object) -> bool:
    """Whether a daemon is to be asked, and started where none answers. SettingsError for what is no answer."""
    if daemon not in ("auto", "off", None):
        raise SettingsError(f'daemon must be "auto" or "off", not {daemon!r}')
    return daemon == "auto"
