"""An incident about each bad or suspect save that somebody verified, until it is good. Where all is good, none of it is
loaded."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ckptguard.errors import CkptguardError
from ckptguard.records.run import Run, list_records
from ckptguard.runs.results import Checked
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

if TYPE_CHECKING:
    from ckptguard.reporting.channels import Tell
    from ckptguard.reporting.notify import Log


class IncidentsOfSaves:
    """Opens incidents, and calls the hooks of the settings for each. Results of hooks are logged to `log`. Incidents
    about saves that are good now are closed.

    The end of the context waits for the hooks. With `tell` these are somebody else's. `run` is the run that has an
    incident about one of the saves.
    """

    def __init__(self, settings: Settings, *, source: str, log: Log, tell: Tell | None = None) -> None:
        self._settings, self._source, self._log = settings, source, log
        self._held = contextlib.ExitStack()
        self._tell = tell
        self.run: str | None = None
        self._known: dict[str, bool] = {}  # by the URL of a run: whether it has incidents

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def judged(self, run: Run, checked: Checked) -> str | None:
        """Take in a verdict that is on record. Returns a sentence if its incident could not be recorded."""
        if checked.outcome is Outcome.GOOD:
            self._close_about(run, checked)
        if checked.outcome not in (Outcome.BAD, Outcome.SUSPECT):
            return None
        from ckptguard.reporting.events import verdict_event
        from ckptguard.reporting.notify import LONGEST_CLOSE, Hooks
        from ckptguard.reporting.open_and_close import record_bad_save

        try:
            incident = record_bad_save(run, checked, source=self._source)
        except CkptguardError as error:
            return f"the incident of {checked.path} could not be recorded: {error.message}"
        if incident is not None or (checked.outcome is Outcome.BAD and checked.id is not None):
            self.run = run.url
        if incident is not None:
            if self._tell is None:
                hooks = Hooks(self._settings, self._log)
                self._held.callback(hooks.close, timeout=LONGEST_CLOSE)
                self._tell = hooks.tell
            self._tell(run, verdict_event(run, checked, source=self._source))
        return None

    def _close_about(self, run: Run, checked: Checked) -> None:
        if run.url not in self._known:
            self._known[run.url] = False
            with contextlib.suppress(CkptguardError):
                self._known[run.url] = bool(list_records(run, "incidents"))
        if self._known[run.url] and checked.id is not None:
            from ckptguard.reporting.open_and_close import close_as_good

            close_as_good(run, checked.path, checked.id)
