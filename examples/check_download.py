"""Check a downloaded model folder before it is loaded.

    python examples/check_download.py FOLDER

Reads every file once: structure, shards, NaN and Inf, pickles that would run code; and compares with MD5SUMS or
SHA256SUMS, if the folder has one. Nothing of a pickle is executed, and nothing is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ckptguard import CkptguardError
from ckptguard.config import Settings
from ckptguard.operations.verify_target import verify_target
from ckptguard.verdict import Outcome


def check(folder: Path) -> bool:
    """Say what is wrong with a folder; whether nothing is."""
    sums = next((str(folder / name) for name in ("SHA256SUMS", "MD5SUMS") if (folder / name).is_file()), None)
    report = verify_target(str(folder), Settings(), record=False, check_sums=sums)
    for checkpoint in report.checkpoints:
        print(f"{checkpoint.path}: {checkpoint.outcome.value}, {checkpoint.bytes} bytes")
        for finding in checkpoint.findings:
            print(f"  {finding.severity.value}: {finding.file or checkpoint.path}: {finding.message}")
    return report.outcome is Outcome.GOOD


if __name__ == "__main__":
    try:
        sys.exit(0 if check(Path(sys.argv[1])) else 3)
    except CkptguardError as error:
        sys.exit(f"error: {error.message}")
