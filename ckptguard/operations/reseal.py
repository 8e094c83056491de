"""Reseal: the user's word that a checkpoint was saved anew, where ckptguard, in doubt, called it damaged."""

from __future__ import annotations

from ckptguard.config import Settings
from ckptguard.operations.listing import select_checkpoint
from ckptguard.operations.report import Checked
from ckptguard.operations.verify import verify_checkpoint
from ckptguard.records.run import Run
from ckptguard.scan import Progress, Scanner, scan_files


def reseal(
    run: Run, settings: Settings, word: str, *, scanner: Scanner = scan_files, progress: Progress | None = None
) -> Checked:
    """Take what lies under a path, id or step as a new generation, and verify it as if seen for the first time.

    Its digests are taken as they are; everything that can be known without them is still checked.
    """
    checkpoint = select_checkpoint(run, word)
    return verify_checkpoint(run, checkpoint, settings, scanner=scanner, resealed=True, progress=progress)
