"""One training a run: a guard says that it trains, and hears of another one that does."""

from __future__ import annotations

import logging

from ckptguard.errors import CkptguardError, SettingsError
from ckptguard.records.leases import TrainingRecord, begin_training, end_training
from ckptguard.records.run import Run
from ckptguard.training.ranks import Ranks, each

_log = logging.getLogger("ckptguard")


class SingleGuard:
    """From `begin` to `end`, or to the end of the process, others can see that this guard trains into a series."""

    def __init__(self, run: Run, series: str, ranks: Ranks) -> None:
        self._run, self._series, self._ranks = run, series, ranks
        self._record: TrainingRecord | None = None
        self._begun: bool | None = None

    def begin(self, *, loops: bool) -> None:
        """To be called by all ranks. SettingsError (on ranks other than 0 RanksError) if another process of this
        machine trains already; a warning if one may."""
        if self._begun is not None and (self._begun or not loops):
            return
        each(self._ranks, "beginning to train", lambda: self._say(loops))
        self._begun = loops

    def end(self) -> None:
        """This guard trains no more; never raises."""
        record, self._record, self._begun = self._record, None, None
        if record is not None:
            try:
                end_training(self._run, record)
            except CkptguardError as error:
                _log.warning("that training ended could not be recorded: %s", error.message)

    def _say(self, loops: bool) -> None:
        if self._ranks.rank != 0:
            return
        try:
            self._record, doubt = begin_training(self._run, self._series, loops=loops, before=self._record)
        except SettingsError:
            raise
        except CkptguardError as error:
            doubt = f"whether another guard trains too is not known: {error.message}"
        if doubt is not None:
            _log.warning("%s", doubt)
