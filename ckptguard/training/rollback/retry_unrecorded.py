"""Owed: what a rollback could not write, for want of space, is made up for as soon as there is some.

Until then the checkpoints that are newer than the one it went back to lie where they are, unmarked. Training replaces
them as it comes to their steps again; a restart before that could resume from one, which is why the log names them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ckptguard.errors import CkptguardError
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.training.rollback.incident_log import begin_incident, end_incident
from ckptguard.training.rollback.lead_and_follow import Loaded
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings

_MOST_PAUSE = 64  # calls between two tries
_log = logging.getLogger("ckptguard")


@dataclass
class _Debt:
    """One rollback. `newer`: paths and signatures of what it should have put aside; `incident`: how it would have been
    recorded, None once it is."""

    reason: str
    newer: list[tuple[str, Any]]
    incident: dict[str, Any] | None
    action: str
    known_good: CheckpointId


class Unrecorded:
    """The debts of one guard; nothing here raises."""

    def __init__(self, run: Run, settings: Settings, series: str) -> None:
        self._run, self._settings, self._series = run, settings, series
        self._debts: list[_Debt] = []
        self._calls = 0

    def note(
        self, loaded: Loaded, *, reason: str, incident: dict[str, Any] | None, action: str, unmarked: bool
    ) -> None:
        """A rollback to `loaded` was not recorded (`incident`: the arguments of `begin_incident`; None: it was), and
        `unmarked`: what is newer was not put aside."""
        newer = []
        if unmarked:
            try:
                found = RunView(self._run, self._settings).checkpoints
                own = [c for c in found if c.series == self._series and c.step is not None]
                newer = [(c.path, c.signature) for c in own if (c.step or 0) > loaded.step]
            except CkptguardError as error:
                _log.warning("what is newer than %s cannot be listed: %s", loaded.path, error.message)
        if newer:
            paths = ", ".join(path for path, _ in newer)
            _log.error("until there is space a restart could resume from what lies unmarked beside it: %s", paths)
        if newer or incident is not None:
            self._debts.append(_Debt(reason, newer, incident, action, loaded.id))
            self._calls = 0

    def settle(self, *, now: bool = False) -> None:
        """Try to put aside and to record what is owed. It is called after each update: what fails is tried again at
        the calls 2, 4, 8 and so on, then at every 64th, and whenever it is said to be `now`."""
        if not self._debts:
            return
        self._calls += 1
        if not now and self._calls % min(_MOST_PAUSE, 1 << (self._calls.bit_length() - 1)):
            return
        while self._debts:
            try:
                self._pay(self._debts[0])
            except (CkptguardError, OSError) as error:
                _log.debug("a rollback is still not recorded: %s", error)
                return
            del self._debts[0]

    def _pay(self, debt: _Debt) -> None:
        from ckptguard.keep.quarantine import quarantine  # loaded when something is owed

        view = RunView(self._run, self._settings)
        while debt.newer:
            path, signature = debt.newer[0]
            checkpoint = view.look_again(path)
            if checkpoint is not None and checkpoint.signature == signature:
                quarantine(view, path, reason=debt.reason)
                _log.warning("%s was put aside, for which there was no space before: %s", path, debt.reason)
            del debt.newer[0]
        if debt.incident is not None:
            incident = begin_incident(self._run, **debt.incident)
            if incident is None:
                raise OSError("the incident cannot be recorded")
            debt.incident = None
            end_incident(self._run, incident, action=debt.action, known_good=debt.known_good)
