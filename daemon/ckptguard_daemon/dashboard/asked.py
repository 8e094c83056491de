"""What is asked of a run: the arguments of each verb, its plan, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.storage.redaction import redacted
from ckptguard.values.ids import escape
from ckptguard.values.settings import Settings, with_table

Word = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class ActionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What would be done, as lines. `costs`: the bytes that are read, sent, moved or deleted, if that is known.

    `about`: plain values that change whenever what the plan is about does.
    """

    lines: tuple[str, ...]
    costs: Mapping[str, int] = {}
    about: Any = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, as lines. `well`: all of what was planned."""

    lines: tuple[str, ...]
    well: bool = True


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of one run. The view is fresh. `arguments` are the verb's own kind of `ActionRequest`. `check`
    raises PlanChangedError for another plan than the one that was agreed to; it is None in a dry run. `name` is that of
    the one who asks."""

    guarded: WatchedRun
    view: RunView
    arguments: Any
    work: Work
    name: str
    check: Callable[[ActionPlan], None] | None = None

    def agreed(self, plan: ActionPlan) -> bool:
        """True if this plan is to be carried out, False in a dry run. Raises PlanChangedError."""
        if self.check is not None:
            self.check(plan)
        return self.check is not None

    @property
    def reason(self) -> str:
        """Why, as records may have it."""
        return escape(redacted(self.arguments.reason))

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return self.view.settings


class ActionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every request for an action says. A real one has a reason, and the token of the plan."""

    dry_run: bool = True
    reason: str = ""
    token: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """What else it says."""
        said = msgspec.structs.asdict(self)
        return {name: value for name, value in said.items() if name not in _OF_ALL and value is not None}


_OF_ALL = ActionRequest.__struct_fields__


class OfRun(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No arguments: it is about the whole run."""


class OfCheckpoint(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint: its path, its id, its step, or its name in the catalogue."""

    checkpoint: Word


class OfAny(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint, or the whole run."""

    checkpoint: Word | None = None


class Pinning(OfCheckpoint, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint, and until when: a date, a time or a span such as 30d."""

    until: Word | None = None


class Silencing(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Until when: a date, a time or a span such as 8h."""

    until: Word


class Rules(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules of retention that are used instead of those in the settings. A form says numbers as text."""

    keep_last: int | Word | None = None
    keep_every: int | Word | None = None
    keep_within: float | Word | None = None
    keep_best: tuple[Word, ...] | Word | None = None
    failed: bool | Word | None = None

    def settings(self, settings: Settings) -> Settings:
        """Return the settings with these rules. Raises SettingsError."""
        given = self.arguments
        if isinstance(self.keep_best, str):
            given["keep_best"] = (self.keep_best,)
        if "failed" in given:
            given["prune_failed"] = given.pop("failed")
        return with_table(settings, given, "the request")


class Going(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far to go back: to a path, an id or a step. `force`: even while files of the run are being written."""

    to: Word | None = None
    step: int | None = None
    force: bool = False


class Verb(NamedTuple):
    """One verb: its arguments, and what plans it or does it. Before its first change it has its plan checked."""

    arguments: type[ActionRequest]
    act: Callable[[Asked], ActionPlan | Done]
