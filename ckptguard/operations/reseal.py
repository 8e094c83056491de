"""Reseal: the user's word that a checkpoint was saved anew, where ckptguard, in doubt, called it damaged."""

from __future__ import annotations

from ckptguard.config import Settings
from ckptguard.errors import SettingsError
from ckptguard.layouts import LAYOUTS
from ckptguard.names import escape
from ckptguard.operations.listing import select_checkpoint
from ckptguard.operations.report import Checked
from ckptguard.operations.verify import verify_checkpoint
from ckptguard.records.run import Run
from ckptguard.scan import Progress, Scanner, scan_files


def reseal(
    run: Run, settings: Settings, word: str, *, scanner: Scanner = scan_files, progress: Progress | None = None
) -> Checked:
    """Take what lies under a path, id or step as a new generation, and verify it as if seen for the first time.

    Its digests are taken as they are; everything that can be known without them is still checked. SettingsError for
    our own layout: it is complete by its writer's manifest alone, which would count no more.
    """
    checkpoint = select_checkpoint(run, word)
    if LAYOUTS[checkpoint.layout].sealed_by_writer:
        raise SettingsError(
            f"{escape(checkpoint.path)} can only be sealed by the training that writes it",
            hint="ckptguard verify says what it is; ckptguard repair puts damaged files right",
        )
    return verify_checkpoint(run, checkpoint, settings, scanner=scanner, resealed=True, progress=progress)
