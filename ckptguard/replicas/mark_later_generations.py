"""Leave behind: have a run that was begun from an older checkpoint of a replica not get the later ones from there."""

from __future__ import annotations

from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records.clock import utc_now
from ckptguard.records.quarantine import Quarantined, mark_moved, mark_quarantined
from ckptguard.records.run import Run
from ckptguard.runs.history import load_history
from ckptguard.runs.lock import run_lock


def leave_behind(replica: Run, target: Run, step: int) -> None:
    """Record in `target` of every generation that the replica has of a later step what a rollback to `step` records:
    it counts as moved aside, and a good one is SUSPECT. What is saved of those steps from now on is another one.

    The next replication to the replica has it know too. For a run in which nothing later was saved.
    """
    reason = f"left behind: training was begun again from step {step}"
    with run_lock(target):
        there, here = load_history(replica), load_history(target)
        for series in {*there.names, *here.names}:
            for key in sorted((k for k in there.sealed(series) if k[0] is not None), key=lambda k: (k[0] or 0, k[1])):
                manifest = there.manifest(series, key)
                if (key[0] or 0) <= step or manifest is None or key in here.quarantined.get(series, ()):
                    continue
                if key in here.standings(series):
                    mark_suspect(target, here, series, key, reason)
                mark = Quarantined(
                    series=series,
                    step=key[0],
                    generation=key[1],
                    path=manifest.path,
                    files=(),
                    signature=(),
                    reason=reason,
                    moved_at=utc_now(),
                )
                mark_quarantined(target, mark)
                mark_moved(target, mark)
