"""Is a checkpoint's MD5 on record? It is serial and slow, so a pass may then leave it out."""

from __future__ import annotations

from ckptguard.layouts import Checkpoint
from ckptguard.records.run import Run
from ckptguard.runs.history import load_history


def md5_is_recorded(run: Run, checkpoint: Checkpoint) -> bool:
    """Whether an earlier pass took the MD5 of every file that is there now, by all that the storage reports of them.

    A manifest that its writer sealed has no MD5 of its own: there the verdict of an earlier pass says that it was
    taken. Files that came later do not count.
    """
    history = load_history(run)
    key = history.current(checkpoint.series, checkpoint.step, checkpoint.path)
    sealed = history.manifest(checkpoint.series, key) if key is not None else None
    if key is None or sealed is None:
        return False
    present = {entry.key: entry.signature for entry in checkpoint.entries}
    if any(present.get(f.path) != (f.size, f.mtime_ns, f.inode, f.etag) for f in sealed.files):
        return False
    verdict = history.verdict(checkpoint.series, key)
    return all(f.md5 for f in sealed.files) or (verdict is not None and "md5" in verdict.digests)
