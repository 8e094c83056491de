"""Point back: a trainer that resumes by a pointer beside its checkpoints (``latest``) finds the known-good one."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Collection

from ckptguard.errors import ObjectMissingError
from ckptguard.formats.text_files import read_pointer
from ckptguard.records.run import Run
from ckptguard.storage.failures import translated
from ckptguard.values.ids import series_of

_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{1,12})")


def point_back(run: Run, known_good: str, present: Collection[str]) -> list[str]:
    """Have pointers beside a checkpoint name it, if they name one of its series that is not `present` (paths). Returns
    the pointers that were written anew. Without this, DeepSpeed would start from scratch and say so in a warning."""
    folder, _, name = known_good.rpartition("/")
    above = f"{folder}/" if folder else ""
    iteration = _ITERATION.fullmatch(name)
    written = []
    for key, text in ((f"{above}latest", name), (f"{above}{_TRACKER}", str(int(iteration[1])) if iteration else None)):
        stated = _stated(run, key)
        if stated is None or text is None:
            continue
        named = f"iter_{int(stated):07d}" if key.endswith(_TRACKER) and stated.isdecimal() else stated
        path = above + named
        if path not in present and series_of(path) == series_of(known_good):
            _replace(run, key, text.encode())
            written.append(key)
    return written


def _stated(run: Run, key: str) -> str | None:
    """What a pointer says; None if there is none, or nothing that could be a name."""
    try:
        if run.storage.stat(key).kind != "file":
            return None
        with run.storage.open(key) as reader:
            return read_pointer(reader, key).metadata.get("points_to")
    except ObjectMissingError:
        return None


def _replace(run: Run, key: str, content: bytes) -> None:
    temporary = f"{key.rpartition('/')[0]}/.tmp-{uuid.uuid4().hex[:8]}".lstrip("/")
    run.storage.create(temporary, content)
    if run.storage.root is not None:
        with translated(key, run.url):
            os.replace(os.path.join(run.storage.root, temporary), os.path.join(run.storage.root, key))
        return
    run.storage.remove(key)
    run.storage.move(temporary, key)
