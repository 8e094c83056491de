"""Accept: a deliberate change of keys, shapes or dtypes."""

from __future__ import annotations

from ckptguard.errors import RefusedError
from ckptguard.records.run_settings import accept_reference
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView, select_checkpoint
from ckptguard.runs.work import PLAIN, Work
from ckptguard.verify.checkpoint import verify_checkpoint


def accept(view: RunView, step: int, *, work: Work = PLAIN) -> Checked:
    """Take the schema of this step's checkpoint as it should be, from now on, and verify the checkpoint again.

    RefusedError if the checkpoint could not even be sealed (INCOMPLETE).
    """
    checkpoint = select_checkpoint(view.run, view.checkpoints, str(step))
    first = verify_checkpoint(view, checkpoint, work=work)
    id = view.current(checkpoint)
    if id is None:
        raise RefusedError(f"{checkpoint.path} is {first.outcome.value}", outcome=first.outcome.value)
    accept_reference(view.run, id, reason="accepted by the user")
    return verify_checkpoint(view, checkpoint, work=work)
