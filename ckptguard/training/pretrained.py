"""Verify pretrained files before the first step."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckptguard.errors import CouldNotTellError, RefusedError
from ckptguard.runs.results import VerifyReport
from ckptguard.runs.settings_file import GivenSettings, given_settings, training_settings
from ckptguard.values.ids import escape
from ckptguard.values.verdict import Outcome, why
from ckptguard.verification.target import Selection, verify_target


def check_pretrained(
    path: str | os.PathLike[str],
    *,
    sums: str | os.PathLike[str] | None = None,
    reference: str | os.PathLike[str] | None = None,
    allow_nonfinite: Sequence[str] = (),
    trust_globals: Sequence[str] = (),
    settings: GivenSettings = None,
) -> VerifyReport:
    """Read a pretrained file, folder or hub snapshot completely. Returns its report if it is GOOD.

    `sums` is a checksum file that came with it; without it, those beside it are used. Without any, damage that leaves
    the file whole and its numbers finite cannot be seen. `reference` is a checkpoint with the names, shapes and dtypes
    that it must have. Nothing is written, and nothing in the file is executed. With several ranks, let one check while
    the others wait.

    Raises:
        RefusedError: it is damaged, incomplete or holds NaN or Inf; see its `outcome`.
        CouldNotTellError: it could not be read, or is being written.
        NotFoundError: it does not exist.
        SettingsError: `sums` cannot be understood.
    """
    chosen = given_settings(settings, lambda: training_settings(path))
    chosen = chosen.changed(
        allow_nonfinite=(*chosen.allow_nonfinite, *allow_nonfinite),
        trust_globals=(*chosen.trust_globals, *trust_globals),
    )
    check_sums, reference = (None if given is None else os.fspath(given) for given in (sums, reference))
    report = verify_target(os.fspath(path), chosen, Selection(record=False, check_sums=check_sums, reference=reference))
    if report.outcome is Outcome.GOOD and report.checkpoints and not report.could_not_tell:
        return report
    found = [f for c in report.checkpoints if c.outcome is report.outcome for f in c.findings]
    said = why(found) or "it holds no checkpoint"
    shown = escape(os.fspath(path))
    if report.outcome in (Outcome.PENDING, Outcome.GOOD):
        raise CouldNotTellError(f"{shown} could not be verified: {said}", hint="verify it before you train from it")
    raise RefusedError(
        f"{shown} is {report.outcome.value}, do not train from it: {said}",
        outcome=report.outcome.value,
        hint=f"fetch it again, then: ckptguard verify {shown}",
    )
