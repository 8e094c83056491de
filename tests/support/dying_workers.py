"""Workers of an engine that die when tests want it: as `--preload` of a Dask worker, or by `pool` as an engine.

- ``DYING_ALWAYS``: a task about a checkpoint whose place ends with this kills its worker.
- ``DYING_ONCE``: the first one about this dies after its verdict is on record, and before anybody heard of it.
- ``DYING_GATE``: one about this says so in the FIFO ``reached``, and then waits for ever.

``DYING_NOTES`` is a folder for what must be known in all workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ckptguard.bulk import worker
from ckptguard.bulk.messages import Task, TaskAnswer
from ckptguard.runs.work import Work
from ckptguard.values.settings import Settings

_verify = worker.VERBS["verify"]


def _is(task: Task, name: str) -> bool:
    wanted = os.environ.get(name)
    return bool(wanted) and f"{task.url}/{task.path}".endswith(str(wanted))


def _verify_or_die(task: Task, settings: Settings, work: Work) -> TaskAnswer:
    notes = Path(os.environ["DYING_NOTES"])
    if _is(task, "DYING_ALWAYS"):
        _die(notes)
    if _is(task, "DYING_GATE"):
        (notes / "reached").write_text("here")
        signal.pause()
    answer = _verify(task, settings, work)
    if _is(task, "DYING_ONCE") and not (notes / "once").exists():
        (notes / "once").touch()
        _die(notes)
    return answer


def _die(notes: Path) -> None:
    (notes / f"died-{os.getpid()}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def install() -> None:
    """Make this process one of them."""
    worker.VERBS["verify"] = _verify_or_die


def dask_setup(worker: object) -> None:
    """What Dask calls for a module that it preloads."""
    install()


def pool() -> ProcessPoolExecutor:
    """Two processes."""
    return ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=install)


def dask() -> Executor:
    """The executor of a Dask client of our own, to the scheduler at ``DYING_SCHEDULER``."""
    from distributed import Client

    connect: Any = Client
    executor: Executor = connect(os.environ["DYING_SCHEDULER"]).get_executor(pure=False, retries=0)
    return executor
