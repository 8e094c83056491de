"""What a training's people should see although they set up no logging, such as where it begins."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptguard.values.own_log import LEAD
from ckptguard.values.own_log import log as _log
from ckptguard.values.plain_numbers import made_again

if TYPE_CHECKING:
    from ckptguard.records.run import Run
    from ckptguard.training.saving.stores import Loaded


def announce(sentence: str) -> None:
    """Log a sentence at level INFO. Where nobody sees that level, write it to stderr.

    Who sets a level for the logger ``ckptguard`` has decided what to see, and gets nothing beside the log.
    """
    seen = _log.isEnabledFor(logging.INFO) and _log.hasHandlers()
    if seen or _log.level != logging.NOTSET or sys.stderr is None:
        _log.info("%s", sentence)
        return
    with contextlib.suppress(OSError, ValueError):  # a stderr that is closed or full must not end training
        print(f"{LEAD}{sentence}", file=sys.stderr, flush=True)


def announce_resume(run: Run, loaded: Loaded | None, *, counted: bool = True, aside: Sequence[str] = ()) -> None:
    """Say in one line from which checkpoint training goes on, how much is made again, which copy was used, and what
    was set `aside`. Without a checkpoint it starts from scratch. `counted`: its step is known."""
    if loaded is None:
        announce(f"there is no good checkpoint in {run.url} yet: training starts from scratch")
        return
    from ckptguard.records.samples import last_update

    reached, at = last_update(run) if counted else (0, None)
    seconds = None if at is None or loaded.saved_at is None else at - loaded.saved_at
    again = made_again(reached - loaded.step, seconds=seconds)
    lead = f"training had reached step {reached}, and resumes" if again else "training resumes"
    step = f" at step {loaded.step}" if counted else ""
    said = f"{lead}{step} from {loaded.path}, which was verified"
    set_aside = f"set aside: {', '.join(aside)}" if aside else ""
    sentence = "; ".join(filter(None, (f"{said}: {again}" if again else said, loaded.remark, set_aside)))
    if loaded.remark or aside:
        _log.warning("%s", sentence)
    else:
        announce(sentence)
