"""Workers of a Dask cluster that note which files they scan: as `--preload` of a Dask worker.

``NOTING_NOTES`` is the folder for the notes, one file a worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ckptguard.bulk import worker
from ckptguard.bulk.messages import Task, TaskAnswer
from ckptguard.runs.work import Work
from ckptguard.values.settings import Settings

Does = Callable[[Task, Settings, Work], TaskAnswer]


def dask_setup(started: object) -> None:
    """What Dask calls for a module that it preloads."""
    place = Path(os.environ["NOTING_NOTES"])
    for verb, does in list(worker.VERBS.items()):

        def noted(task: Task, settings: Settings, work: Work, does: Does = does, verb: str = verb) -> TaskAnswer:
            began = time.perf_counter()
            answer = does(task, settings, work)
            with (place / str(os.getpid())).open("a") as file:
                file.write(f"{verb} {time.perf_counter() - began:.2f} {' '.join(task.files)}\n")
            return answer

        worker.VERBS[verb] = noted
