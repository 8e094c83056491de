"""Verify what a user names: a run, a checkpoint, a single file, a hub cache.

What has no records is judged at first sight.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec

from ckptguard.checks import run_checks
from ckptguard.checks.evidence import FoundSums, KnownFacts
from ckptguard.checks.pickle_safety import is_executor, unknown_names
from ckptguard.checks.understood import not_understood, what_of
from ckptguard.errors import (
    ChangedWhileReadError,
    ChecksumFileError,
    CkptguardError,
    CouldNotTellError,
    DeniedError,
    NotFoundError,
    NotUnderstoodError,
    ObjectMissingError,
    SettingsError,
)
from ckptguard.formats import FORMATS
from ckptguard.layouts import LAYOUTS, Checkpoint, enter, folder_as_checkpoint
from ckptguard.layouts.hub_snapshot import HubFacts
from ckptguard.records.run import Run
from ckptguard.runs.hub_paths import hub_checkpoint, hub_facts
from ckptguard.runs.pointers import pointer_notes
from ckptguard.runs.results import Checked, VerifyReport, checked, pending, relative_to
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import wait_until_quiet
from ckptguard.runs.target import Target, resolve_target, saves_beside
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import Scan, ScanOptions
from ckptguard.scan.result import ScannedFile
from ckptguard.storage import Entry
from ckptguard.storage.hub_blobs import HubCacheStorage, blob_of
from ckptguard.values.ids import CheckpointId, escape, numbers_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import PLUGIN, UNDERSTOOD, Finding, Outcome, Severity, judge
from ckptguard.verification.checksum_files import CheckSums, read_check_sums
from ckptguard.verification.collect_evidence import (
    collect_evidence,
    manifest_files,
    manifest_without_seal,
    scan_checkpoint,
)
from ckptguard.verification.found_sums import find_sums, from_hub, given_sums

_MOST_CLASSES = 1000  # of a pickled model; a hostile file may name half a million
_EXPLAINED_BESIDE = {row.name for row in FORMATS if row.explained_beside}  # their own bytes alone do not explain them
_PENDING = {ChecksumFileError: "checksum-file", NotUnderstoodError: UNDERSTOOD}  # the check of what has no verdict
_WAIT = 120.0  # seconds to wait for a save that is still being written


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
    wait: float = _WAIT


ALL = Selection()
Judged = Callable[[Run, Checked], str | None]


def verify_target(
    target: str | Target, settings: Settings, what: Selection = ALL, *, judged: Judged | None = None, work: Work = PLAIN
) -> VerifyReport:
    """Verify a file, a checkpoint or a run. A run's verdicts are recorded; any other target writes nothing.

    Each chosen checkpoint is judged once it is quiet. `judged` is called with each recorded verdict, and returns a note
    for the report, or None. NotFoundError if there is nothing to verify. What cannot be read is PENDING in the report,
    never BAD.
    """
    resolved = resolve_target(target, settings) if isinstance(target, str) else target
    notes = [
        f"{name} is a link out of the cache and was not followed; to verify it, name its target"
        for name in resolved.unread
    ]
    run = resolved.view if not what.check_sums else None  # with other sums than the sealed ones nothing is recorded
    chosen = _chosen(resolved, what)
    verify_one = _judge_of(resolved, run, settings, what, chosen, notes, work)
    results, unsure, unread = [], bool(resolved.unread), None
    for checkpoint in chosen:
        quiet = _when_quiet(resolved, run, checkpoint, settings.settle, what.wait)
        try:
            found = verify_one(quiet) if quiet is not None else pending(checkpoint, "it is still being written")
            note = judged(run.run, found) if judged is not None and run is not None and what.record else None
            notes += [] if note is None else [note]
        except CouldNotTellError as error:
            unsure = unsure or not isinstance(error, ChangedWhileReadError)
            check = _PENDING.get(type(error), "reading")
            found = pending(quiet or checkpoint, error.message, check)
        results.append(relative_to(found, resolved.prefix))
    if run is not None and resolved.checkpoint is None:
        run.forget()  # pointers are compared with the final state
        unsure, unread = unsure or bool(run.listing.unread), run.listing.not_understood
        notes += run.listing.unread_notes
        notes += [] if unread is None else ["; ".join(unread.notes)]
        notes += pointer_notes(run, {c.path: c.outcome for c in results})
    known_good, none_is_good = None, False
    if run is not None and any(one.outcome is not Outcome.GOOD for one in results):
        known_good, could_tell = _known_good(run, results)
        judged_all = not unsure and len(chosen) == len(run.checkpoints)
        judged_all = judged_all and all(one.outcome is not Outcome.PENDING for one in results)
        none_is_good = could_tell and judged_all and known_good is None
    return VerifyReport(
        target=resolved.url,
        run=None if run is None else run.run.url,
        known_good=known_good,
        none_is_good=none_is_good,
        kind=resolved.kind,
        checkpoints=tuple(results),
        notes=tuple(dict.fromkeys(notes)),
        could_not_tell=unsure,
        not_understood=unread,
    )


def _known_good(run: RunView, results: Sequence[Checked]) -> tuple[tuple[str, CheckpointId] | None, bool]:
    """Return the path and the id of what the run can go back to, and whether that could be told. What was just found
    not to be good does not count, whatever is on record. Never raises: the verdicts are there."""
    from ckptguard.runs.find_known_good import known_good_candidates  # only where something is not good

    failed = {one.id for one in results if one.outcome is not Outcome.GOOD}
    with contextlib.suppress(CkptguardError):
        for found in known_good_candidates(run):
            if not (found.in_place and found.id in failed):
                return (found.manifest.path, found.id), True
        return None, True
    return None, False


def _judge_of(
    resolved: Target,
    run: RunView | None,
    settings: Settings,
    what: Selection,
    chosen: Sequence[Checkpoint],
    notes: list[str],
    work: Work,
) -> Callable[[Checkpoint], Checked]:
    """Return what judges the checkpoints of a target: by the records of its run, or at first sight."""
    sums = read_check_sums(what.check_sums, settings.storage) if what.check_sums else None
    reference = _read_reference(what.reference, settings, work) if what.reference else None
    if run is not None:
        from ckptguard.verification.checkpoint import (
            Verification,  # records, copies and pins: only a run needs them
            judge_in_run,
        )

        return judge_in_run(run, Verification(record=what.record, reference=reference), notes, work)
    if sums is not None and len(chosen) != 1:
        raise SettingsError("a checksum file goes with a file or one checkpoint, not with a run", hint="name one")
    return StrayJudge(resolved, settings, sums, reference, work).judge


def _when_quiet(
    resolved: Target, run: RunView | None, checkpoint: Checkpoint, settle: float, wait: float
) -> Checkpoint | None:
    """Return a checkpoint once nobody writes it; None if that takes longer. What its writer seals is finished by that,
    and not by time."""
    if run is not None and LAYOUTS[checkpoint.layout].sealed_by_writer:
        return checkpoint
    return wait_until_quiet(checkpoint, lambda: _relist(resolved, checkpoint), settle=settle, limit=wait)


def _relist(target: Target, checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the checkpoint as storage lists it now, or None if it is gone."""
    try:
        if isinstance(target.storage, HubCacheStorage):
            return hub_checkpoint(target.storage, checkpoint.path)
        if target.view is not None:
            return target.view.look_again(checkpoint.path)
        if checkpoint.layout == "file":
            return msgspec.structs.replace(checkpoint, entries=(target.storage.stat(checkpoint.path),))
        entries = target.storage.list(checkpoint.path, recursive=True, enter=enter, unread=True)
        return folder_as_checkpoint(checkpoint.path, entries)
    except ObjectMissingError:
        return None


def _read_reference(url: str, settings: Settings, work: Work = PLAIN) -> Manifest:
    """Return the schema of another checkpoint, as a manifest that is never written."""
    target = resolve_target(url, settings)
    if target.checkpoint is None:
        raise SettingsError(f"the reference {url} is a run", hint="name one of its checkpoints")
    scan = scan_checkpoint(
        target.storage, target.checkpoint, ScanOptions(md5=False), Work(scanner=work.scanner), settings
    )
    evidence = collect_evidence(target.storage, target.checkpoint, scan)
    if any(f.structure.problems for f in scan.files):
        raise SettingsError(f"the reference {url} is itself damaged", hint=f"ckptguard verify {shlex.quote(url)}")
    return manifest_without_seal(evidence.checkpoint, manifest_files(evidence))


def _chosen(resolved: Target, what: Selection) -> list[Checkpoint]:
    if resolved.checkpoint is not None:
        return [resolved.checkpoint]
    if resolved.view is None:
        if what.step is not None or what.newest is not None:
            raise SettingsError("the snapshots of a hub cache have no steps to choose by", hint="name one of them")
        return list(resolved.snapshots)
    found = [c for c in resolved.view.checkpoints if what.step is None or c.step == what.step]
    if what.step is not None and not found:
        raise NotFoundError(f"there is no checkpoint of step {what.step} in {resolved.url}")
    ordered = sorted(found, key=lambda c: (c.step is None, numbers_of(c.step), c.written_at, c.path))
    if what.newest is None:
        return ordered
    numbered = [c for c in ordered if c.step is not None]
    return numbered[-what.newest :] if what.newest > 0 else []


class Blob(NamedTuple):
    """A file of a repository's snapshots that need not be read twice: the same bytes under the same name."""

    repository: str
    name: str
    key: str
    signature: tuple[object, ...]


@dataclass(frozen=True)
class StrayJudge:
    """Judges checkpoints of a target at first sight, and records nothing.

    It compares them with stated checksums and another checkpoint's schema, if there are any.
    """

    _target: Target
    _settings: Settings
    _sums: CheckSums | None
    _reference: Manifest | None
    _work: Work
    _blobs: dict[Blob, ScannedFile] = field(default_factory=dict)

    def judge(self, checkpoint: Checkpoint) -> Checked:
        """Return the outcome and findings of a quiet checkpoint. It raises the scanner's errors."""
        started = time.monotonic()
        target, settings = self._target, self._settings
        facts: HubFacts | None = None
        if isinstance(target.storage, HubCacheStorage):
            facts = hub_facts(target.storage, checkpoint)
            checkpoint = msgspec.structs.replace(checkpoint, irregular=())  # the facts say more about them
            sums = self._sums_of(checkpoint)
            scan = self._scan_by_digest(checkpoint, sums.added_to(ScanOptions(md5=False)), facts)
        else:
            sums = self._sums_of(checkpoint)
            options = sums.added_to(ScanOptions(md5=settings.digest != "blake3"))
            scan = scan_checkpoint(target.storage, checkpoint, options, self._work, settings)
        # The manifest in a run's own records must also agree.
        id = target.view.current(checkpoint) if target.view is not None else None
        known = KnownFacts(
            sealed=target.view.history.manifest(id) if target.view is not None and id is not None else None,
            reference=self._reference,
            must_match=self._reference is not None,
            in_run=target.view is not None or (facts is None and self._is_of_a_training(scan, sums)),
            allow_nonfinite=settings.allow_nonfinite,
            trust_globals=settings.trust_globals,
            vouched=frozenset(checkpoint.files if facts is not None else ()),  # else a finding says so
            sums=sums,
        )
        evidence = collect_evidence(target.storage, checkpoint, scan, known)
        findings = run_checks(evidence)
        if settings.checks and not settings.no_plugins:
            from ckptguard.verification.plugin_checks import plugin_findings  # only where the settings name some

            findings += plugin_findings(evidence, findings, settings)
        proven_bad = any(finding.severity is Severity.ERROR for finding in findings)
        if not proven_bad and (unread := not_understood(evidence)):
            where = "" if unread[0] == checkpoint.path else f"{escape(unread[0])}: "
            what = escape(what_of(evidence, unread[0]))
            raise NotUnderstoodError(f"{where}{what} is not understood, and no checksum is stated for it")
        unsure = [f for f in findings if f.check == PLUGIN and f.severity is Severity.SICKNESS]
        if not proven_bad and unsure:
            raise CouldNotTellError(unsure[0].message.removeprefix("could not tell: "))
        if facts is not None:
            findings += _hub_findings(scan, facts)
        outcome = judge(findings, sealed=known.sealed is not None)
        seconds = time.monotonic() - started
        return checked(checkpoint, None, outcome, sealed=known.sealed, seconds=seconds, findings=findings)

    def _is_of_a_training(self, scan: Scan, sums: FoundSums) -> bool:
        """True if another save of the run around it needs the same names outside the allow-list: one training wrote
        both. Not for a download from the hub, or if a name is known to run code."""
        trusted = self._settings.trust_globals
        names = _classes_of(scan.files, trusted)
        if not names or from_hub(sums):
            return False
        with contextlib.suppress(DeniedError):  # a file may be read in a folder that may not be listed
            for storage, other in saves_beside(self._target, self._settings):
                with contextlib.suppress(DeniedError, ObjectMissingError, ChangedWhileReadError):
                    read = self._work.scanner(storage, other.files, ScanOptions(structure_only=True), None).files
                    broken = any(f.structure.is_broken for f in read)
                    if names <= _classes_of(read, trusted) and not broken:
                        return True
        return False

    def _sums_of(self, checkpoint: Checkpoint) -> FoundSums:
        storage, beside = self._target.storage, list[Entry]()
        if self._sums is not None:
            return given_sums(self._sums, storage, checkpoint)
        hub = isinstance(storage, HubCacheStorage)
        if checkpoint.path in checkpoint.files and not hub:
            with contextlib.suppress(DeniedError):  # a file may be read in a folder that may not be listed
                beside = storage.list(checkpoint.path.rpartition("/")[0])
        return find_sums(storage, checkpoint, [e for e in beside if e.kind != "folder"], hub_record=not hub)

    def _scan_by_digest(self, checkpoint: Checkpoint, options: ScanOptions, facts: HubFacts) -> Scan:
        """Scan the files of a snapshot, each with the digest in its blob's name.

        Files that another snapshot has under the same name, unchanged since, are not read again.
        """
        groups: dict[tuple[str, ...], list[str]] = {}
        repository = checkpoint.path.partition("/")[0]
        for place in [p for p in self._blobs if p.repository != repository]:
            del self._blobs[place]
        known: list[ScannedFile] = []
        for entry in checkpoint.entries:
            before = self._blobs.get(_blob(checkpoint, entry))
            if before is not None and all(before.digest(name) for name in (*options.sums, *["md5"] * options.md5)):
                known.append(msgspec.structs.replace(before, entry=entry))
            else:
                algorithms = facts.sums[entry.key][:1] if entry.key in facts.sums else ()
                groups.setdefault(algorithms, []).append(entry.key)
        scans = []
        for stated, keys in groups.items():
            wanted = msgspec.structs.replace(options, sums=tuple(dict.fromkeys((*options.sums, *stated))))
            scans.append(self._work.scanner(self._target.storage, keys, wanted, self._work.progress))
        read = [f for scan in scans for f in scan.files]
        files = sorted([*known, *read], key=lambda f: f.entry.key)
        self._blobs.update((_blob(checkpoint, f.entry), f) for f in read if f.structure.format not in _EXPLAINED_BESIDE)
        return Scan(files=tuple(files), seconds=sum(scan.seconds for scan in scans))


def _classes_of(files: Iterable[ScannedFile], trusted: Collection[str]) -> set[str]:
    """Return the names outside the allow-list that a training's own classes may have. There are none if one is known to
    run code, or if they are more than any training needs."""
    names = set(islice(unknown_names(files, trusted), _MOST_CLASSES + 1))
    return set() if len(names) > _MOST_CLASSES or any(map(is_executor, names)) else names


def _blob(checkpoint: Checkpoint, entry: Entry) -> Blob:
    repository, key = checkpoint.path.partition("/")[0], blob_of(entry.key, entry.target) or entry.key
    return Blob(repository, checkpoint.inside(entry.key), key, entry.signature)


def _hub_findings(scan: Scan, facts: HubFacts) -> Iterator[Finding]:
    """Report what the hub cache itself shows about a snapshot.

    Errors: bytes that differ from the blob's name, links elsewhere, missing blobs, unfinished downloads. A ref without
    its snapshot is a warning, and files without a digest are a notice.
    """
    for file in scan.files:
        algorithm, expected = facts.sums.get(file.entry.key, ("", None))
        found = file.sums.get(algorithm)
        if expected is not None and found != expected:
            message = f"{algorithm} differs from the name of its blob"
            yield Finding("digests", Severity.ERROR, message, file.entry.key, expected=expected, found=found)
    without = [f.entry.key for f in scan.files if f.entry.key not in facts.sums]
    if without:
        what = f"{len(without)} files have no digest in the cache: only their structure and numbers were checked"
        yield Finding("digests", Severity.NOTICE, what, without[0])
    for key, why in sorted(facts.refused.items()):
        yield Finding("structure", Severity.ERROR, f"{why}: it was not read", key)
    for key in facts.missing:
        yield Finding(
            "completeness", Severity.ERROR, "its blob is missing: it was not downloaded, or it was removed", key
        )
    for key in facts.unfinished:
        yield Finding("completeness", Severity.ERROR, "a download into this repository did not finish", key)
    for ref, commit in sorted(facts.lost_refs.items()):
        message = f"it names the commit {escape(commit)}, but there is no snapshot of it"
        yield Finding("completeness", Severity.WARNING, message, ref)
