"""Supervise's other thread, in which work on the storage may hang."""

import subprocess
import sys

HANGS = """
import time
from ckptguard.supervise.command import SupervisedCommand
from ckptguard.supervise.wait_for_command import HeldSignals, SignalWatch

with HeldSignals() as held:
    watch = SignalWatch(held, SupervisedCommand(["true"], held.before, list), print)
    assert watch.beside(lambda: 7, None) == 7
    watch.submit(lambda: time.sleep(600))
    raise SystemExit(3)  # any exception that nobody has thought of
"""


def test_a_storage_that_hangs_keeps_no_process_from_its_end():
    """Nobody waits for the thread, not even after an exception."""
    assert subprocess.run([sys.executable, "-c", HANGS], check=False, timeout=60).returncode == 3
