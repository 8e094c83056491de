"""Reseal: the user's word that a checkpoint was saved anew, where ckptguard, in doubt, called it damaged."""

from __future__ import annotations

from ckptguard.errors import SettingsError
from ckptguard.layouts import LAYOUTS
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView, select_checkpoint
from ckptguard.runs.work import PLAIN, Work
from ckptguard.values.ids import escape
from ckptguard.verify.checkpoint import Verification, verify_checkpoint


def reseal(view: RunView, word: str, *, work: Work = PLAIN) -> Checked:
    """Take what lies under a path, id or step as a new generation, and verify it as if seen for the first time.

    Its digests are taken as they are; everything that can be known without them is still checked. SettingsError for
    our own layout: it is complete by its writer's manifest alone, which would count no more.
    """
    checkpoint = select_checkpoint(view.run, view.checkpoints, word)
    if LAYOUTS[checkpoint.layout].sealed_by_writer:
        raise SettingsError(
            f"{escape(checkpoint.path)} can only be sealed by the training that writes it",
            hint="ckptguard verify says what it is; ckptguard repair puts damaged files right",
        )
    return verify_checkpoint(view, checkpoint, Verification(resealed=True), work=work)
