"""What a training's people should see although they set up no logging, such as where it begins."""

from __future__ import annotations

import contextlib
import logging
import sys

_log = logging.getLogger("ckptguard")


def announce(sentence: str) -> None:
    """Log a sentence at level INFO. Where nobody sees that level, write it to stderr.

    Who sets a level for the logger ``ckptguard`` has decided what to see, and gets nothing beside the log.
    """
    seen = _log.isEnabledFor(logging.INFO) and _log.hasHandlers()
    if seen or _log.level != logging.NOTSET or sys.stderr is None:
        _log.info("%s", sentence)
        return
    with contextlib.suppress(OSError, ValueError):  # a stderr that is closed or full must not end training
        print(f"ckptguard: {sentence}", file=sys.stderr, flush=True)


def announce_resume(run: str, path: str | None, step: int | None = None) -> None:
    """Say from which checkpoint training goes on; without a path, that it starts from scratch."""
    if path is None:
        announce(f"there is no good checkpoint in {run} yet: training starts from scratch")
    else:
        at = "" if step is None else f" at step {step}"
        announce(f"training resumes{at} from {path}, which was verified")
