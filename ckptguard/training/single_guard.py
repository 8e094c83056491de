"""One training per run: a guard announces that it trains, and finds another one that does."""

from __future__ import annotations

from ckptguard.errors import CkptguardError, SettingsError
from ckptguard.records.leases import TrainingRecord, begin_training, end_training
from ckptguard.records.run import Run
from ckptguard.training.ranks import Ranks, each
from ckptguard.values.own_log import log as _log


class SingleGuard:
    """Announces, from `begin` to `end` or the end of the process, that this guard trains into a series."""

    def __init__(self, run: Run, series: str, ranks: Ranks) -> None:
        self._run, self._series, self._ranks = run, series, ranks
        self._record: TrainingRecord | None = None
        self._begun: bool | None = None

    def begin(self, *, loops: bool) -> None:
        """Announce the training. All ranks call it. Warns if another process may be training into the run.

        Raises SettingsError if another process of this machine certainly is (RanksError on ranks other than 0).
        """
        if self._begun is not None and (self._begun or not loops):
            return
        each(self._ranks, "starting to train", lambda: self._say(loops))
        self._begun = loops

    def end(self) -> None:
        """Withdraw the announcement. Never raises."""
        record, self._record, self._begun = self._record, None, None
        if record is not None:
            try:
                end_training(self._run, record)
            except CkptguardError as error:
                _log.warning("the end of the training could not be recorded: %s", error.message)

    def _say(self, loops: bool) -> None:
        if self._ranks.rank != 0:
            return
        try:
            self._record, doubt = begin_training(self._run, self._series, loops=loops, before=self._record)
        except SettingsError:
            raise
        except CkptguardError as error:
            doubt = f"could not find out whether another guard is training: {error.message}"
        if doubt is not None:
            _log.warning("%s", doubt)
