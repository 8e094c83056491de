"""Verdicts and incidents in TensorBoard, Weights & Biases and MLflow, beside the curves of the training.

::

    writer = SummaryWriter("logs/exp1")
    ckptguard.integrations.tracking.follow("runs/exp1", tensorboard=writer)

    ckptguard.integrations.tracking.follow("runs/exp1", wandb=wandb.init(project="exp1"))

    ckptguard.integrations.tracking.follow("runs/exp1", mlflow=mlflow.start_run())

It reads the records of the run, written by a guard, a daemon or the command line. A thread does so, and any failure
there is a warning: training neither waits for it nor ends by it.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from ckptguard.decisions.known_good import CurrentVerdict
from ckptguard.errors import CkptguardError, NotFoundError, SettingsError
from ckptguard.records.incidents import incident_ids
from ckptguard.records.run import Run
from ckptguard.records.silences import silence_now
from ckptguard.reporting.channels import Event
from ckptguard.reporting.events import events_on_record
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.run_view import open_view
from ckptguard.runs.settings_file import training_settings
from ckptguard.values.ids import CheckpointId, single_number
from ckptguard.values.own_log import log as _log
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

__all__ = ["Follower", "follow"]

_LAST_LOOK = 10.0  # seconds that `close` waits for
_LONGEST = 5000  # characters that MLflow takes for a tag

Facts = dict[str, Any]


def follow(
    run: str | os.PathLike[str],
    *,
    tensorboard: Any = None,
    wandb: Any = None,
    mlflow: Any = None,
    settings: Settings | None = None,
) -> Follower:
    """Write what becomes known of a run's checkpoints to trackers, until the process ends or `close` is called.

    `tensorboard` is a SummaryWriter, `wandb` a run that `wandb.init` returned, and `mlflow` a run that
    `mlflow.start_run` returned. Of several ranks only the first one writes. SettingsError if there is no tracker.
    """
    trackers: list[_Tracker] = []
    if os.environ.get("RANK", "0") == "0":
        if tensorboard is not None:
            trackers.append(_TensorBoard(tensorboard))
        if wandb is not None:
            trackers.append(_Wandb(wandb))
        if mlflow is not None:
            trackers.append(_MLflow(mlflow))
        if not trackers:
            raise SettingsError("there is nothing to write to", hint="give follow one of tensorboard=, wandb=, mlflow=")
    return Follower(os.fspath(run), trackers, settings or training_settings(run))


class Follower:
    """Looks at a run's records now and then. `close` looks once more and stops; so does the end of a `with` block."""

    def __init__(self, url: str, trackers: list[_Tracker], settings: Settings) -> None:
        self._url, self._settings, self._trackers = url, settings, trackers
        self._complained: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ckptguard-tracking", daemon=True)
        if trackers:
            self._thread.start()

    def close(self) -> None:
        """Write what came since the last look, and stop. Waits ten seconds at most."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_LOOK)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self) -> None:
        while True:
            is_last = self._ending.is_set()
            try:
                self._look()
            except NotFoundError:
                pass  # training will make it
            except Exception as error:
                self._complain(f"the records of {self._url} cannot be read", error)
            if is_last:
                return
            self._ending.wait(self._settings.scan_interval)

    def _look(self) -> None:
        view = open_view(self._url, self._settings)
        now = {id: s for series in view.history.names for id, s in view.history.current_verdicts(series).items()}
        on_record = events_on_record(view)
        for tracker in self._trackers:
            changed = [s for id, s in now.items() if tracker.current_verdicts.get(id) != s]
            new = [make() for key, make in on_record.items() if key not in (tracker.written or ())]
            if changed or new:
                facts: Facts = {
                    "known_good": _known_good(view.run),
                    "checkpoints_not_good": sum(s.outcome is not Outcome.GOOD for s in now.values()),
                    "incidents": len(incident_ids(view.run)),
                }
                tracker.may_alert = tracker.written is not None and silence_now(view.run) is None
                try:
                    tracker.write(changed, [event for event in new if event is not None], facts)
                except Exception as error:  # of whatever its library does; the next look writes the same again
                    self._complain(f"{type(tracker).__name__.strip('_')} was not told of {self._url}", error)
                    continue
            tracker.current_verdicts, tracker.written = now, set(on_record)

    def _complain(self, what: str, error: Exception) -> None:
        """Once for each kind of trouble."""
        if (said := f"{what}: {type(error).__name__}") not in self._complained:
            self._complained.add(said)
            _log.warning("%s: %r", what, error)


class _Tracker:
    """One tracker, and what it was told: verdicts, and the keys of events (None: nothing yet). `may_alert`: the run is
    not silenced, and events are news: they were not on record when this training began."""

    def __init__(self, to: Any) -> None:
        self._to = to
        self.current_verdicts: dict[CheckpointId, CurrentVerdict] = {}
        self.written: set[str] | None = None
        self.may_alert = False

    def write(self, changed: list[CurrentVerdict], events: list[Event], facts: Facts) -> None:
        """Write verdicts that are new or changed, events, and how the run stands now."""
        raise NotImplementedError


class _TensorBoard(_Tracker):
    """A curve that is 1 at the step of a good checkpoint and else 0, and texts."""

    def write(self, changed: list[CurrentVerdict], events: list[Event], facts: Facts) -> None:
        for step, good in _points(changed):
            self._to.add_scalar("ckptguard/checkpoint_is_good", good, step)
        for event in events:
            text = f"{event['title']}\n{event['text']}".replace("\n", "  \n")  # Markdown's line break
            self._to.add_text(f"ckptguard/{event['event']}", text, single_number(event["step"]))
        self._to.flush()


class _Wandb(_Tracker):
    """The summary, a tag where something is wrong, and an alert for each event that is news. No row of the history:
    that would count as a step of the training."""

    def write(self, changed: list[CurrentVerdict], events: list[Event], facts: Facts) -> None:
        self._to.summary.update({f"ckptguard/{name}": value for name, value in facts.items()})
        for event in events:
            tag = "ckptguard: incident" if event["event"] == "incident" else f"ckptguard: {event['cause']}"
            if tag not in (self._to.tags or ()):
                self._to.tags = (*(self._to.tags or ()), tag)
            if self.may_alert:
                self._to.alert(event["title"], event["text"], level="WARN")


class _MLflow(_Tracker):
    """A metric that is 1 at the step of a good checkpoint and else 0, and tags."""

    def write(self, changed: list[CurrentVerdict], events: list[Event], facts: Facts) -> None:
        import mlflow

        client, run_id = mlflow.MlflowClient(), self._to.info.run_id
        for step, good in _points(changed):
            client.log_metric(run_id, "ckptguard_checkpoint_is_good", good, step=step)
        tags = {f"ckptguard.{name}": str(value) for name, value in facts.items()}
        tags |= {f"ckptguard.last_{e['event']}": f"{e['title']}\n{e['text']}"[:_LONGEST] for e in events}
        for name, text in tags.items():
            client.set_tag(run_id, name, text)


def _points(changed: list[CurrentVerdict]) -> list[tuple[int, float]]:
    """(step, 1 or 0) of those that have one step."""
    return [
        (s.id.step, float(s.outcome is Outcome.GOOD))
        for s in sorted(changed, key=lambda s: s.id.order)
        if isinstance(s.id.step, int)
    ]


def _known_good(run: Run) -> str:
    try:
        found = find_known_good(run)
    except CkptguardError:
        return "none"
    return found.path
