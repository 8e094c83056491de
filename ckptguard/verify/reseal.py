"""Reseal: the user's word that a checkpoint was saved anew, where ckptguard, in doubt, called it damaged."""

from __future__ import annotations

from ckptguard.errors import SettingsError
from ckptguard.layouts import LAYOUTS
from ckptguard.records.run import Run
from ckptguard.runs.listing import select_checkpoint
from ckptguard.runs.results import Checked
from ckptguard.scan import Progress, Scanner, scan_files
from ckptguard.values.ids import escape
from ckptguard.values.settings import Settings
from ckptguard.verify.checkpoint import verify_checkpoint


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
