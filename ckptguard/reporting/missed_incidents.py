"""Make the incidents of a run follow its ledger, whatever was killed after it wrote a verdict.

Each save that is bad has an incident, and none is open about a save that is good again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptguard.decisions.known_good import CurrentVerdict
from ckptguard.records.notified import INCIDENTS, mark_notified, read_notified, skip_notifications, verdict_key
from ckptguard.reporting.build_report import checkpoint_of
from ckptguard.reporting.events import judged_on_record
from ckptguard.reporting.open_and_close import close_as_good, close_incident, record_bad_saves
from ckptguard.runs.history import History
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.values.verdict import Outcome


class MissedIncidents:
    """The incidents of one run that is guarded. What its ledger said when it was guarded for the first time needs none.

    A change of the ledger's names makes work, and nothing else does.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._settled: set[str] | None = None  # keys of verdicts; None: not begun
        self._names: Collection[str] | None = None

    @property
    def has_begun(self) -> bool:
        """True if it is known what needs no incident."""
        return self._settled is not None

    def begin(self, view: RunView) -> None:
        """Note what needs no incident, and make up for what was left undone. Call it before the first new verdict.
        Raises StorageError."""
        settled = read_notified(view.run).get(INCIDENTS)
        if settled is None:
            settled = {verdict_key(current_verdict) for current_verdict in _changes(view.history)}
            skip_notifications(view.run, INCIDENTS, settled)
        self._send_missed(view, settled)
        self._settled = settled

    def record_missed(self, view: RunView, names: Collection[str] | None) -> list[Checked]:
        """Open and close what is due, unless the names of the ledger are those of the last time. Returns the
        checkpoints whose incident was opened. Raises StorageError, and is tried again then."""
        if self._settled is None or (names is not None and names == self._names):
            return []
        opened = self._send_missed(view, self._settled)
        self._names = names
        return opened

    def _send_missed(self, view: RunView, settled: set[str]) -> list[Checked]:
        new = {verdict_key(current_verdict): current_verdict for current_verdict in _changes(view.history)}
        judged = {key: judged_on_record(view, new[key].id) for key in new if key not in settled}
        found = [one for one in judged.values() if one is not None]
        for one in found:
            if one.outcome is Outcome.GOOD and one.id is not None:
                close_as_good(view.run, one.path, one.id)
        bad = [one for one in found if one.outcome is Outcome.BAD]
        opened = record_bad_saves(view.run, bad, source=self._source)
        for one, incident in opened:
            is_own = checkpoint_of(incident) == one.id  # and not one of the training that it joined
            if is_own and one.id is not None and view.history.is_quarantined(one.id):
                close_incident(view.run, incident, action=f"{one.path} was moved aside before")
        for key in judged:
            mark_notified(view.run, INCIDENTS, key)  # so no later start asks about it
            settled.add(key)
        return [one for one, _ in opened]


def _changes(history: History) -> Iterator[CurrentVerdict]:
    """Yield the first verdict of each trouble that lasts, and of each that ended well."""
    for series in list(history.names):
        for current_verdict in history.current_verdicts(series).values():
            is_again = current_verdict.outcome is Outcome.GOOD and current_verdict.number > 1
            if current_verdict.outcome is Outcome.BAD or is_again:
                first = history.first_of(current_verdict)
                if first.outcome is Outcome.BAD or first.number > 1:
                    yield first
