"""Recover a run after its command was stopped or died: an incident in the records, and back to known-good."""

from __future__ import annotations

from collections.abc import Callable

from ckptguard.errors import CkptguardError, NotFoundError
from ckptguard.incidents.notify import Event, incident_event
from ckptguard.incidents.open_and_close import close_incident
from ckptguard.records.incidents import Incident, open_incident
from ckptguard.records.run import Run, has_records, open_run
from ckptguard.supervise.save_watch import SaveWatch, SupervisedRollback
from ckptguard.supervise.sick_saves import SickSave
from ckptguard.values.settings import Settings


class Recovery:
    """Goes back, and leaves a record of why and of what was done. Nothing raises."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        saves: SaveWatch,
        *,
        tell: Callable[[str], None],
        event: Callable[[Event], None],
    ) -> None:
        self._url, self._settings, self._saves = url, settings, saves
        self._tell, self._event = tell, event

    def go_back(self, sick: list[SickSave], why: str, status: int | None) -> CkptguardError | None:
        """Go back because of sick saves, or after the command died with `status`; the error if that failed."""
        try:
            for sentence in _sentences(self._go_back(sick, why, status)):
                self._tell(sentence)
        except NotFoundError:
            return None  # there is no run yet, so there is nothing to go back from
        except CkptguardError as error:
            return error
        except Exception as error:
            return CkptguardError(f"going back failed: {type(error).__name__}: {error}")
        return None

    def give_up(self, sick: list[SickSave], why: str, status: int | None, action: str) -> None:
        """Nothing more is done, and why."""
        self._close(self._open(sick, why, status), action)

    def _go_back(self, sick: list[SickSave], why: str, status: int | None) -> SupervisedRollback:
        incident = self._open(sick, why, status)
        try:
            went = self._saves.go_back(sick, f"supervise: {why}")
        except CkptguardError as error:
            self._close(incident, f"could not go back: {error.message}")
            raise
        self._close(incident, "; ".join(_sentences(went)), known_good=str(went.ids[0]) if went.ids else None)
        return went

    def _open(self, sick: list[SickSave], why: str, status: int | None) -> Incident | None:
        try:
            run = self._run()
            if not sick and not has_records(run):
                return None  # a command that never saved anything; a folder of ours may keep it from starting
            incident = open_incident(
                run,
                step=sick[0].step if sick else None,
                cause="numeric" if sick else "crash",
                reason="; ".join(f"{s.path}: {s.reason}" for s in sick) or why,
                evidence={} if status is None else {"exit_status": status},
                source="supervise",
            )
            self._event(incident_event(run, incident))
            return incident
        except NotFoundError:
            return None  # nor that
        except Exception as error:
            self._tell(f"the incident could not be recorded: {error}")
            return None

    def _close(self, incident: Incident | None, action: str, *, known_good: str | None = None) -> None:
        self._saves.close_left_incidents(f"the command ended; supervise: {action}")
        if incident is None:
            return
        try:
            close_incident(self._run(), incident, action=action, known_good=known_good)
        except Exception as error:
            self._tell(f"the incident {incident.id} could not be closed: {error}")

    def _run(self) -> Run:
        return open_run(self._url, self._settings)


def _sentences(went: SupervisedRollback) -> list[str]:
    """What was done, for people."""
    moved = [f"quarantined {', '.join(went.quarantined)}"] if went.quarantined else []
    return [*moved, f"went back to {', '.join(went.to)}" if went.to else "there is nothing to go back to"]
