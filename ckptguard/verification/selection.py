"""What of a target is verified, and against what."""

from __future__ import annotations

import msgspec

DEFAULT_WAIT = 120.0  # seconds to wait for a save that is still being written


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """What of a target is verified, and against what. `step` and `newest` choose among a run's checkpoints.
    `check_sums` is a checksum file. `reference` is a checkpoint whose keys, shapes and dtypes must match. `wait` are
    seconds to wait for files that are still being written. `record`: a run's verdicts go into its ledger."""

    step: int | None = None
    newest: int | None = None
    record: bool = True
    check_sums: str | None = None
    reference: str | None = None
    wait: float = DEFAULT_WAIT
