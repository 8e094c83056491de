"""The last save of a training gets its verdict when training ends, because people ship it."""

from __future__ import annotations

import time

from ckptguard.errors import CouldNotTellError, NoKnownGoodError
from ckptguard.layouts import Checkpoint
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.training.client import let_daemon_verify
from ckptguard.training.saving.stores import LoadingStore
from ckptguard.upkeep.finish_copies import looks_as_judged
from ckptguard.values.ids import numbers_of
from ckptguard.values.own_log import log as _log
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint


def judge_last_save(view: RunView, store: LoadingStore, *, daemon: float | None, seconds: float | None = None) -> None:
    """Verify the newest save of a store: by the daemon within `daemon` seconds (None: not asked), else here.

    Here it may take `seconds` (None: unlimited). The log says if it is not good, or has no verdict. Never raises.
    """
    run = view.run
    try:
        series = store.series
        newest = _unjudged(view, series)
        if newest is not None and daemon is not None:
            let_daemon_verify(run, before_step=None, series=series, wait_seconds=daemon)
            view.forget()
            newest = _unjudged(view, series)
        if newest is not None:
            checked = verify_checkpoint(view, newest, work=_within(seconds))
            if checked.outcome is not Outcome.GOOD:
                path = run.usable(newest.path)
                _log.error("the last save is %s; see why with: ckptguard show %s", checked.outcome.value, path)
    except NoKnownGoodError:
        pass  # nothing was saved
    except Exception as error:  # training ended well: an error of ours must not fail a single rank
        _log.warning("the last save has no verdict (%s); run ckptguard verify %s", error, run.url)


def _unjudged(view: RunView, series: str) -> Checkpoint | None:
    """Return the newest save in place, unless it already has a verdict."""
    own = [c for c in view.checkpoints if c.series == series]
    newest = max(own, key=lambda c: (numbers_of(c.step), c.path), default=None)
    id = view.current_if_readable(newest) if newest is not None else None
    return newest if newest is not None and (id is None or not looks_as_judged(view, newest, id)) else None


def _within(seconds: float | None) -> Work:
    """Return work that is given up after this many seconds, because other ranks wait for it."""
    if seconds is None:
        return PLAIN
    end = time.monotonic() + seconds

    def progress(_: int) -> None:
        if time.monotonic() > end:
            raise CouldNotTellError(f"reading it takes longer than {seconds:g} s")

    return Work(progress=progress)
