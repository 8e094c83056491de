"""A few pieces of work at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptguard.training.saving.background_save import Abandoned

T = TypeVar("T")


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """The results in order, once all are over. Of several failures one that says more than Abandoned is raised.

    Plain threads: an executor takes no more work once the interpreter is ending, and a save may be under way then.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(1, len(works))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    for failure in sorted(failures, key=lambda f: isinstance(f, Abandoned)):
        raise failure
    return [results[n] for n in range(len(works))]
