"""Verify what has no records: a stray file or checkpoint, a hub cache, anything held against a checksum file."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ckptguard.checks import run_checks
from ckptguard.checks.hub_digests import check_hub_cache
from ckptguard.errors import ChangedWhileReadError, CouldNotTellError, ObjectMissingError, SettingsError
from ckptguard.formats import FORMATS
from ckptguard.formats.opaque import NAME as OPAQUE
from ckptguard.layouts import Checkpoint, enter, folder_as_checkpoint
from ckptguard.layouts.hub_snapshot import HubFacts
from ckptguard.records.run import Run
from ckptguard.runs.history import load_history
from ckptguard.runs.hub_paths import hub_checkpoint, hub_facts
from ckptguard.runs.listing import find_checkpoint
from ckptguard.runs.results import Checked, Report, pending, relative_to
from ckptguard.runs.settling import wait_until_quiet
from ckptguard.runs.target import Target
from ckptguard.scan import Progress, Scan, Scanner, ScanOptions
from ckptguard.scan.result import ScannedFile
from ckptguard.storage import Entry
from ckptguard.storage.hub_blobs import HubCacheStorage, blob_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import judge, limit_findings
from ckptguard.verify.checksum_files import CheckSums
from ckptguard.verify.collect_evidence import collect_evidence, scan_checkpoint


class Blob(NamedTuple):
    """A file of a repository's snapshots that need not be read twice: the same bytes under the same name."""

    repository: str
    name: str
    key: str
    signature: tuple[object, ...]


ScannedBlobs = dict[Blob, ScannedFile]
_EXPLAINED_BESIDE = {row.name for row in FORMATS if row.explained_beside}  # not by their own bytes alone


def verify_strays(
    target: Target,
    checkpoints: Sequence[Checkpoint],
    settings: Settings,
    *,
    sums: CheckSums | None,
    reference: Manifest | None,
    wait: float,
    scanner: Scanner,
    progress: Progress | None,
) -> Report:
    """Judge each at first sight and record nothing. SettingsError for a checksum file and several checkpoints."""
    if sums is not None and len(checkpoints) != 1:
        raise SettingsError("a checksum file goes with a file or one checkpoint, not with a run", hint="name one")
    results, unsure = [], bool(target.unread)
    blobs: ScannedBlobs = {}
    for checkpoint in checkpoints:
        relist = functools.partial(_relist, target, checkpoint)
        quiet = wait_until_quiet(checkpoint, relist, settle=settings.settle, limit=wait)
        try:
            if quiet is None:
                checked = pending(checkpoint, "it is still being written")
            else:
                checked = _judged(
                    target, quiet, settings, blobs, sums=sums, reference=reference, scanner=scanner, progress=progress
                )
        except CouldNotTellError as error:
            unsure = unsure or not isinstance(error, ChangedWhileReadError)
            checked = pending(quiet or checkpoint, error.message)
        results.append(relative_to(checked, target.prefix))
    notes = tuple(f"{name} is a link out of the cache and was not followed: name it itself" for name in target.unread)
    return Report(target=target.url, kind=target.kind, checkpoints=tuple(results), notes=notes, could_not_tell=unsure)


def _relist(target: Target, checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint as storage shows it now; None if it is gone."""
    try:
        if isinstance(target.storage, HubCacheStorage):
            return hub_checkpoint(target.storage, checkpoint.path)
        if target.run is not None:
            return find_checkpoint(target.run, checkpoint.path)
        if checkpoint.layout == "file":
            return msgspec.structs.replace(checkpoint, entries=(target.storage.stat(checkpoint.path),))
        entries = target.storage.list(checkpoint.path, recursive=True, enter=enter)
        return folder_as_checkpoint(checkpoint.path, entries)
    except ObjectMissingError:
        return None


def _judged(
    target: Target,
    checkpoint: Checkpoint,
    settings: Settings,
    blobs: ScannedBlobs,
    *,
    sums: CheckSums | None,
    reference: Manifest | None,
    scanner: Scanner,
    progress: Progress | None,
) -> Checked:
    started = time.monotonic()
    expected = sums.of(checkpoint.path, checkpoint.files, target.storage.url) if sums is not None else {}
    algorithms = tuple(sorted({algorithm for algorithm, _ in expected.values()} - {"md5"}))
    stated = "md5" in {algorithm for algorithm, _ in expected.values()}
    options = ScanOptions(md5=stated or settings.digest == "md5", sums=algorithms)
    facts: HubFacts | None = None
    if isinstance(target.storage, HubCacheStorage):
        facts = hub_facts(target.storage, checkpoint)
        options = msgspec.structs.replace(options, md5=stated)
        scan = _scan_by_digest(target, checkpoint, options, facts, blobs, scanner, progress)
        checkpoint = msgspec.structs.replace(checkpoint, irregular=())  # the facts say more about them
    else:
        scan = scan_checkpoint(target.storage, checkpoint, options, scanner=scanner, progress=progress)
        if target.kind == "file" and not expected and scan.files[0].structure.format == OPAQUE:
            raise CouldNotTellError("nothing is known of its format, and no checksum is stated for it")
    sealed = _sealed_in(target.run, checkpoint) if target.run is not None else None
    evidence = collect_evidence(
        target.storage,
        checkpoint,
        scan,
        sealed=sealed,
        reference=reference,
        in_run=target.run is not None,
        allow_nonfinite=settings.allow_nonfinite,
        trust_globals=settings.trust_globals,
        expected_sums=expected,
    )
    found = run_checks(evidence)
    if facts is not None:
        found += check_hub_cache(scan, facts)
    findings = limit_findings(found)
    return Checked(
        path=checkpoint.path,
        series=checkpoint.series,
        layout=checkpoint.layout,
        step=checkpoint.step,
        id=None,
        outcome=judge(findings, sealed=sealed is not None),
        digest_origin=sealed.digest_origin if sealed else None,
        bytes=checkpoint.bytes,
        seconds=round(time.monotonic() - started, 3),
        findings=findings,
    )


def _blob(checkpoint: Checkpoint, entry: Entry) -> Blob:
    repository = checkpoint.path.partition("/")[0]
    return Blob(
        repository, checkpoint.inside(entry.key), blob_of(entry.key, entry.target) or entry.key, entry.signature
    )


def _scan_by_digest(
    target: Target,
    checkpoint: Checkpoint,
    options: ScanOptions,
    facts: HubFacts,
    blobs: ScannedBlobs,
    scanner: Scanner,
    progress: Progress | None,
) -> Scan:
    """One pass over the files of a snapshot, each with the digest that its own blob is named by. Those that another
    snapshot has under the same name, and that were not touched since, were read for that one."""
    groups: dict[str | None, list[str]] = {}
    repository = checkpoint.path.partition("/")[0]
    for place in [p for p in blobs if p.repository != repository]:
        del blobs[place]
    known: list[ScannedFile] = []
    for entry in checkpoint.entries:
        before = blobs.get(_blob(checkpoint, entry))
        if before is not None:
            known.append(msgspec.structs.replace(before, entry=entry))
        else:
            algorithm = facts.sums[entry.key][0] if entry.key in facts.sums else None
            groups.setdefault(algorithm, []).append(entry.key)
    scans = []
    for algorithm, keys in groups.items():
        sums = dict.fromkeys((*options.sums, *((algorithm,) if algorithm else ())))
        scans.append(scanner(target.storage, keys, msgspec.structs.replace(options, sums=tuple(sums)), progress))
    read = [f for scan in scans for f in scan.files]
    files = sorted([*known, *read], key=lambda f: f.entry.key)
    blobs.update((_blob(checkpoint, f.entry), f) for f in read if f.structure.format not in _EXPLAINED_BESIDE)
    return Scan(files=tuple(files), seconds=sum(scan.seconds for scan in scans))


def _sealed_in(run: Run, checkpoint: Checkpoint) -> Manifest | None:
    """The manifest with which a run's own records say that this place must agree."""
    history = load_history(run)
    key = history.current(checkpoint.series, checkpoint.step, checkpoint.path)
    return history.manifest(checkpoint.series, key) if key is not None else None
