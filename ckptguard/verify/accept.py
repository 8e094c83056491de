"""Accept: a deliberate change of keys, shapes or dtypes."""

from __future__ import annotations

from ckptguard.errors import RefusedError
from ckptguard.records.run import Run
from ckptguard.records.run_settings import accept_reference
from ckptguard.runs.history import load_history
from ckptguard.runs.listing import select_checkpoint
from ckptguard.runs.results import Checked
from ckptguard.scan import Progress, Scanner, scan_files
from ckptguard.values.settings import Settings
from ckptguard.verify.checkpoint import verify_checkpoint


def accept(
    run: Run, settings: Settings, step: int, *, scanner: Scanner = scan_files, progress: Progress | None = None
) -> Checked:
    """Take the schema of this step's checkpoint as it should be, from now on, and verify the checkpoint again.

    RefusedError if the checkpoint could not even be sealed (INCOMPLETE).
    """
    checkpoint = select_checkpoint(run, str(step))
    first = verify_checkpoint(run, checkpoint, settings, scanner=scanner, progress=progress)
    key = load_history(run).current(checkpoint.series, checkpoint.step, checkpoint.path)
    if key is None:
        raise RefusedError(f"{checkpoint.path} is {first.outcome.value}", outcome=first.outcome.value)
    accept_reference(run, checkpoint.series, *key, reason="accepted by the user")
    return verify_checkpoint(run, checkpoint, settings, scanner=scanner, progress=progress)
