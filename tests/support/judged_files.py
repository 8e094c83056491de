"""The outcome of one file at first sight, without a run or records: what the checks find in what the scan read."""

from __future__ import annotations

from pathlib import Path

from ckptguard.checks import run_checks
from ckptguard.layouts import Checkpoint
from ckptguard.scan import ScanOptions, scan_files
from ckptguard.storage import open_storage
from ckptguard.values.verdict import Finding, Outcome, judge
from ckptguard.verification.collect_evidence import collect_evidence
from ckptguard.verification.target import verify_target
from support.runs import QUICK


def findings_of(folder: Path, files: dict[str, bytes]) -> list[Finding]:
    """What is found in a checkpoint of these files."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    storage = open_storage(folder)
    scan = scan_files(storage, list(files), ScanOptions(md5=False))
    entries = tuple(file.entry for file in scan.files)
    path = entries[0].key if len(entries) == 1 else ""
    checkpoint = Checkpoint(path=path, layout="file" if path else "folder", series="n-#", step=5, entries=entries)
    return run_checks(collect_evidence(storage, checkpoint, scan))


def outcome_in_run(run: Path, name: str, data: bytes) -> Outcome:
    """The verdict on one file in a run, by its bytes alone."""
    run.mkdir(exist_ok=True)
    (run / name).write_bytes(data)
    [found] = verify_target(str(run), QUICK).checkpoints
    return found.outcome


def outcome_of(folder: Path, data: bytes, name: str = "net-5.pt") -> Outcome:
    """The outcome of one file."""
    return judge(findings_of(folder, {name: data}), sealed=False)
