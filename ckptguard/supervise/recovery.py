"""The incidents of a supervised command: what went wrong, and what was done about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptguard.decisions.restarts import GAVE_UP
from ckptguard.engine.going_back import GoingBack, Tell
from ckptguard.engine.sick_saves import SickSave
from ckptguard.errors import CkptguardError, NotFoundError
from ckptguard.records.incidents import Incident, list_incidents, open_incident, update_incident
from ckptguard.records.run import has_records
from ckptguard.reporting.events import incident_event
from ckptguard.reporting.notify import Hooks
from ckptguard.reporting.open_and_close import close_incident
from ckptguard.values.ids import single_number

_OURS = ("supervise", "daemon", "cli", "gate")  # sources of incidents from outside the command


class Recovery:
    """Rolls back, and records why and what was done. Never raises."""

    def __init__(self, back: GoingBack, hooks: Hooks, tell: Tell) -> None:
        self._back, self._hooks, self._tell = back, hooks, tell
        self._before: set[str] = set()  # incidents that were on record at a start of the command
        self._abandoned: set[str] = set()  # incidents of a killed supervise

    def take_over(self, series: Iterable[str], targets: Mapping[str, int]) -> None:
        """Continue after a killed supervise; see `GoingBack.take_over`. Its open incidents are closed with the next."""
        self._back.take_over(series, targets)
        self._abandoned = {i.id for i in self.incidents() if i.state != "closed" and i.source == "supervise"}

    def incidents(self) -> list[Incident]:
        """Return the incidents of the run; none if they cannot be read."""
        try:
            return list_incidents(self._back.open())
        except CkptguardError:
            return []

    def begin(self) -> None:
        """Before a start of the command: no guard inside it deals with what is on record now."""
        self._before |= {incident.id for incident in self.incidents()}

    def of_guards(self) -> list[Incident]:
        """Return the incidents that a guard inside the command is dealing with."""
        return [incident for incident in self._of_command() if incident.state != "closed"]

    def has_given_up(self) -> bool:
        """True if a guard inside the command has spent its own budget of rollbacks."""
        return any(i.actions and i.actions[-1].startswith(GAVE_UP) for i in self._of_command())

    def _of_command(self) -> list[Incident]:
        return [i for i in self.incidents() if i.id not in self._before and i.source not in _OURS]

    def go_back(
        self, sick: list[SickSave], why: str, status: int | None, after: str | None = None
    ) -> CkptguardError | None:
        """Roll back because of sick saves, or after the command died with `status`. Returns the error if that
        failed. `after`: what follows that, for the record."""
        incident = self._open(sick, why, status)
        then = () if after is None else (after,)
        try:
            went = self._back.go_back(sick, f"supervise: {why}")
        except Exception as error:
            failed = error
            if not isinstance(failed, CkptguardError):
                failed = CkptguardError(f"the rollback failed: {type(error).__name__}: {error}")
            self._close(incident, "; ".join((f"could not roll back: {failed.message}", *then)))
            # Without a run there is nothing to go back to.
            return None if isinstance(failed, NotFoundError) else failed
        self._close(incident, "; ".join((*went.sentences, *then)), known_good=str(went.ids[0]) if went.ids else None)
        for sentence in went.sentences:
            self._tell(sentence)
        return None

    def give_up(self, sick: list[SickSave], why: str, status: int | None, action: str) -> None:
        """Record that nothing more is done, and why."""
        self._close(self._open(sick, why, status), action)

    def _open(self, sick: list[SickSave], why: str, status: int | None) -> Incident | None:
        try:
            run = self._back.open()
            if not sick and not has_records(run):
                return None  # the command never saved anything; a folder of ours may keep it from starting
            incident = open_incident(
                run,
                step=single_number(sick[0].step) if sick else None,
                cause="crash" if not sick else "anew" if sick[0].anew else "numeric",
                reason="; ".join(f"{s.path}: {s.reason}" for s in sick) or why,
                evidence={} if status is None else {"exit_status": status},
                source="supervise",
            )
            self._hooks.tell(run, incident_event(run, incident))
            return incident
        except NotFoundError:
            return None  # the same
        except Exception as error:
            self._tell(f"the incident could not be recorded: {error}")
            return None

    def _close(self, incident: Incident | None, action: str, *, known_good: str | None = None) -> None:
        """Close an incident, and those of the command's guard or of a killed supervise, with what we did."""
        abandoned = [i for i in self.incidents() if i.id in self._abandoned and i.state != "closed"]
        try:
            for left in (*abandoned, *self.of_guards()):
                update_incident(
                    self._back.open(), left, state="closed", action=f"the command ended; supervise: {action}"
                )
            if incident is not None:
                close_incident(self._back.open(), incident, action=action, known_good=known_good)
        except Exception as error:
            about = "incidents" if incident is None else f"the incident {incident.id}"
            self._tell(f"{about} could not be closed: {error}")
