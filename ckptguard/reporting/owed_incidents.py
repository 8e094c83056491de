"""Make the incidents of a run follow its ledger, whatever was killed after it wrote a verdict: one for each save that
is bad, and none open for one that is good again."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptguard.decisions.known_good import Standing
from ckptguard.records.told import leave_untold, read_told
from ckptguard.reporting.build_report import checkpoint_of
from ckptguard.reporting.events import judged_on_record, verdict_key
from ckptguard.reporting.open_and_close import close_as_good, close_incident, record_bad_saves
from ckptguard.runs.history import History
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.values.verdict import Outcome

_US = "000000000000"  # among the addresses that are told: the incidents of the run


class OwedIncidents:
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
        told = read_told(view.run).get(_US)
        if told is not None:
            self._make_up(view, told)
        settled = {verdict_key(standing) for standing in _changes(view.history)}
        if told is None or not settled <= told:
            leave_untold(view.run, _US, settled - (told or set()))  # so no later start asks about them
        self._settled = settled

    def make_up(self, view: RunView, names: Collection[str] | None) -> list[Checked]:
        """Open and close what is due, unless the names of the ledger are those of the last time. Returns the
        checkpoints whose incident was opened. Raises StorageError, and is tried again then."""
        if self._settled is None or (names is not None and names == self._names):
            return []
        opened = self._make_up(view, self._settled)
        self._settled = {verdict_key(standing) for standing in _changes(view.history)}
        self._names = names
        return opened

    def _make_up(self, view: RunView, settled: Collection[str]) -> list[Checked]:
        owed: list[Checked] = []
        for standing in _changes(view.history):
            found = judged_on_record(view, standing.id) if verdict_key(standing) not in settled else None
            if found is None or found.id is None:
                continue
            if found.outcome is Outcome.GOOD:
                close_as_good(view.run, found.path, found.id)
            elif found.outcome is Outcome.BAD:
                owed.append(found)
        opened = record_bad_saves(view.run, owed, source=self._source)
        for found, incident in opened:
            is_own = checkpoint_of(incident) == found.id  # and not one of the training that it joined
            if is_own and found.id is not None and view.history.is_quarantined(found.id):
                close_incident(view.run, incident, action=f"{found.path} was moved aside before")
        return [found for found, _ in opened]


def _changes(history: History) -> Iterator[Standing]:
    """Yield the first verdict of each trouble that lasts, and of each that ended well."""
    for series in list(history.names):
        for standing in history.standings(series).values():
            if standing.outcome is Outcome.BAD or (standing.outcome is Outcome.GOOD and standing.number > 1):
                first = history.first_of(standing)
                if first.outcome is Outcome.BAD or first.number > 1:
                    yield first
