"""What an engine's workers call: functions of plain data that return plain data, and never raise."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from ckptguard.bulk import tasks
from ckptguard.bulk.messages import SOFTWARE, Table, Task, TaskAnswer, trouble_of
from ckptguard.bulk.sight import other_sight
from ckptguard.errors import SettingsError, StoppedError
from ckptguard.runs.settings_file import load_settings
from ckptguard.runs.work import Work
from ckptguard.scan import scanner_of
from ckptguard.scan.process.limits import die_with
from ckptguard.values.record_text import decodable
from ckptguard.values.settings import Settings, with_table
from ckptguard.values.storage_options import StorageOptions

VERBS: dict[str, Callable[[Task, Settings, Work], TaskAnswer]] = {
    "look": lambda task, settings, work: TaskAnswer(),  # that it may do the task
    "scan": tasks.scan_part,
    "verify": tasks.verify_one,
    "scrub": tasks.scrub_one,
    "replicate": tasks.replicate_one,
    "repair": tasks.repair_run,
}
_THREADS = 2  # of one task, if the settings do not say: an engine runs several side by side
_PAUSE = 1.0  # seconds before a worker says that it may do nothing: meanwhile the tasks go to others


class Stop(Protocol):
    """A `threading.Event`, or one of multiprocessing."""

    def is_set(self) -> bool:
        """True once work is to end early."""


_stop: Stop | None = None


def begin(stop: Stop | None, parent: int | None = None) -> None:
    """Prepare a worker on the coordinator's own machine. Its tasks end once `stop` is set. `parent` is the process that
    it must not outlive."""
    global _stop
    _stop = stop
    if parent is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the coordinator, which says when to stop
        die_with(parent)


def identify() -> dict[str, str]:
    """Say which worker this is."""
    said = {"host": f"{socket.gethostname()}:{os.getpid()}"}
    if "distributed" in sys.modules:
        from distributed import get_worker

        with contextlib.suppress(ValueError):  # it is no worker of Dask
            said["address"] = get_worker().address
    return said


def perform(table: Table) -> Table:
    """Do one task. Beside it the table says what `software` the coordinator has, and on its own machine the storage
    `options` of the run."""
    answer: TaskAnswer
    try:
        answer = _answer(table)
    except Exception as error:
        answer = TaskAnswer(trouble=trouble_of(error))
    if answer.differs or answer.blind:
        time.sleep(_PAUSE)
    found = msgspec.to_builtins(msgspec.structs.replace(answer, **identify()))
    assert isinstance(found, dict)
    return found


def _answer(table: Table) -> TaskAnswer:
    if table.get("software") != SOFTWARE:
        return TaskAnswer(differs=SOFTWARE)
    _check_stop(0)
    task = msgspec.convert(table, decodable(Task))
    settings = with_table(Settings(), task.settings, "a task")
    try:
        options = StorageOptions(table["options"]) if "options" in table else _own_options(task)
    except SettingsError as error:
        return TaskAnswer(blind=f"{error.message} ({error.hint})")
    blind = other_sight(task, options)
    if blind:
        return TaskAnswer(blind=blind)
    settings = settings.changed(storage=options, workers=settings.workers or _THREADS)
    work = Work(scanner=scanner_of(settings, rate=task.rate), progress=_check_stop, rate=task.rate)
    return VERBS[task.verb](task, settings, work)


def _check_stop(_: int) -> None:
    if _stop is not None and _stop.is_set():
        raise StoppedError("it was stopped", key="")


def _own_options(task: Task) -> StorageOptions:
    """Return the storage options of a task's run, with the secrets that this worker has itself."""
    if not task.storage:
        return StorageOptions()
    own = load_settings(None, os.environ, [task.url]).storage.revealed()
    missing = [name for name in task.storage if name not in own]
    if missing:
        raise SettingsError(
            f"has no storage options for {', '.join(missing)}",
            hint="set CKPTGUARD_STORAGE where the worker starts, or put ckptguard.toml there",
        )
    return StorageOptions({name: own[name] for name in task.storage})
