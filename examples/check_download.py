"""Check a downloaded model before it is loaded.

    python examples/check_download.py FOLDER

FOLDER is any folder with a model, or a place in a Hugging Face hub cache. Every file is read once: structure, shards,
NaN and Inf, pickles that would run code. In a hub cache each file is compared with the name of its blob; elsewhere
with SHA256SUMS, MD5SUMS or the like, if the folder has one. Nothing of a pickle is executed, and nothing is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ckptguard import CkptguardError
from ckptguard.values.exit_codes import of_outcomes
from ckptguard.values.ids import escape
from ckptguard.values.settings import Settings
from ckptguard.verification.target import Selection, verify_target


def check(folder: Path) -> int:
    """Say what is wrong with a folder; the exit code: 0 good, 3 bad, 4 incomplete, 1 could not tell."""
    report = verify_target(str(folder), Settings(), Selection(record=False))
    for checkpoint in report.checkpoints:
        print(f"{escape(checkpoint.path)}: {checkpoint.outcome.value}, {checkpoint.bytes} bytes")
        for finding in checkpoint.findings:
            place = escape(finding.file or checkpoint.path)
            print(f"  {finding.severity.value}: {place}: {escape(finding.message)}")
    return of_outcomes((c.outcome for c in report.checkpoints), could_not_tell=report.could_not_tell)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/check_download.py FOLDER")
    try:
        sys.exit(check(Path(sys.argv[1])))
    except CkptguardError as error:
        sys.exit(f"error: {error.message}")
