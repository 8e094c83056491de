"""Which part of a target is verified, and against what."""

from __future__ import annotations

import msgspec

DEFAULT_WAIT = 120.0  # seconds to wait for a save that is still being written


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a target is verified, and against what.

    - `step`, `newest`: choose among a run's checkpoints.
    - `check_sums`: a checksum file.
    - `reference`: a checkpoint whose keys, shapes and dtypes must match.
    - `wait`: seconds to wait for files that are still being written.
    - `record`: write a run's verdicts to its ledger.
    """

    step: int | None = None
    newest: int | None = None
    record: bool = True
    check_sums: str | None = None
    reference: str | None = None
    wait: float = DEFAULT_WAIT
