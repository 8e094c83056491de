"""Workers of an engine that see another storage: as `--preload` of a Dask worker, or one process of `pool`.

What lies below ``BLIND_FROM`` is for them what lies below ``BLIND_TO``, which need not exist. Once one was asked to
look there, the file ``BLIND_ASKED`` exists, if that is set.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ckptguard.storage.local.local_storage import LocalStorage

_open = LocalStorage.__init__


def _open_other(self: LocalStorage, root: Any) -> None:
    asked = os.environ.get("BLIND_ASKED")
    if asked:
        Path(asked).touch()
    _open(self, str(root).replace(os.environ["BLIND_FROM"], os.environ["BLIND_TO"]))


def dask_setup(worker: object) -> None:
    """What Dask calls for a module that it preloads."""
    LocalStorage.__init__ = _open_other  # type: ignore[method-assign]


def _first_is_blind() -> None:
    try:
        Path(os.environ["BLIND_NOTE"]).touch(exist_ok=False)
    except FileExistsError:
        return
    dask_setup(None)


def pool() -> ProcessPoolExecutor:
    """Four processes, one of which is blind."""
    return ProcessPoolExecutor(4, multiprocessing.get_context("spawn"), initializer=_first_is_blind)
