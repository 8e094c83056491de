"""Verified runs with kept copies, and a bit that rots in them."""

import os

from ckptguard.records.run import open_run
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from support.runs import QUICK, write_sharded
from support.views import look


def guarded(root, *, keep="copy", writer=write_sharded, steps=(100, 200)):
    """A run of verified checkpoints with kept copies."""
    for step in steps:
        writer(root, step, seed=step)
    run = open_run(str(root))
    reconcile(look(run, QUICK.changed(keep=keep)), PassNotes())
    return run


def flip(path, offset=20000):
    """One bit, with times kept."""
    times = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
