"""A glance at the records of many checkpoints, which reads only those that changed since a memo was made of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

from ckptguard.decisions.known_good import by_generation, parse_verdict_name
from ckptguard.errors import ObjectMissingError, RecordsError
from ckptguard.inspect.state_memo import JudgedAs, MemoRow, RememberedFile, SealedAs, StateMemo
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.ledger import latest_verdict
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.manifests import read_manifest, sealed_id
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import CheckpointId, series_from_folder
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Severity, Verdict

_COARSE = 5.0  # seconds: more than the step of any file system's times


class Glance:
    """What the records of a run say of its checkpoints, by as few reads as possible.

    The records are listed when this is made, before anything is read. So what is read is at least as new as the stamp
    under which the memo remembers it. Where the listing and the view's history differ, the memo is left aside.
    """

    def __init__(self, view: RunView, memo: StateMemo) -> None:
        self._memo, self._run = memo, view.run
        self._entries = _listed(view.run)
        self._history = view.history
        self._rows: dict[CheckpointId, MemoRow] = {}
        self._names: dict[str, dict[CheckpointId, list[str]]] = {}

    def sealed(self, id: CheckpointId) -> SealedAs | None:
        """What its manifest says, but for the files; None if it cannot be read."""
        return self._row(id, files=False).sealed

    def sealed_files(self, id: CheckpointId) -> SealedAs | None:
        """What its manifest says, with the files."""
        return self._row(id, files=True).sealed

    def sealed_path(self, id: CheckpointId) -> str | None:
        """The path that it was sealed for; None if its manifest cannot be read."""
        sealed = self.sealed(id)
        return sealed.path if sealed is not None else None

    def judged(self, id: CheckpointId) -> JudgedAs | None:
        """What the verdict that counts says; None if there is none."""
        return self._row(id, files=False).judged

    def forget_others(self) -> None:
        """Have the memo forget what this glance did not look at."""
        self._memo.keep_only(self._rows.keys())

    def _row(self, id: CheckpointId, *, files: bool) -> MemoRow:
        row = self._rows.get(id)
        if row is not None and (row.has_files or not files):
            return row
        stamp = self._stamp(id)
        row = self._memo.row(id, stamp) if stamp is not None else None
        if row is None or (files and not row.has_files):
            row = self._read(id, stamp or b"", files)
            if stamp is not None:
                self._memo.put(row)
        self._rows[id] = row
        return row

    def _read(self, id: CheckpointId, stamp: bytes, files: bool) -> MemoRow:
        # From storage, and not as the history may remember it: that may be older than the stamp.
        manifest = _manifest(self._run, id) if id in self._history.sealed(id.series) else None
        verdict = latest_verdict(self._run, id, self._names_of(id))
        return MemoRow(
            series=id.series,
            step=id.step,
            generation=id.generation,
            stamp=stamp,
            sealed=_sealed_as(manifest, files) if manifest is not None else None,
            judged=_judged_as(verdict) if verdict is not None else None,
            has_files=files or manifest is None,
        )

    def _stamp(self, id: CheckpointId) -> bytes | None:
        """What tells the records of a checkpoint from others under the same names; None if nothing does."""
        listed = self._entries.get(id, {})
        names = {f"{LEDGER}/{name}" for name in self._names_of(id)}
        if id in self._history.sealed(id.series):
            names.add(MANIFESTS)
        if not names or names != listed.keys() or not all(map(_is_told_apart, listed.values())):
            return None
        signatures = sorted((name, *entry.signature) for name, entry in listed.items())
        return hashlib.blake2b(repr(signatures).encode("utf-8", "surrogateescape"), digest_size=16).digest()

    def _names_of(self, id: CheckpointId) -> list[str]:
        if id.series not in self._names:
            self._names[id.series] = by_generation(id.series, self._history.names.get(id.series, ()))
        return self._names[id.series].get(id, [])


def heaviest_reason(verdict: Verdict) -> str:
    """The message of the heaviest finding, with what it is about; "" where nothing weighs."""
    for severity in (Severity.ERROR, Severity.SICKNESS, Severity.WARNING):
        for finding in verdict.findings:
            if finding.severity is severity:
                about = finding.tensor or finding.file
                return f"{about}: {finding.message}" if about else finding.message
    return ""


def _is_told_apart(entry: Entry) -> bool:
    """Whether a record that is made anew under the same name will look different to storage."""
    if entry.etag or entry.inode is not None:
        return True
    if entry.mtime_ns is None:
        return False
    # Where times are whole seconds (SFTP), only of a record that is older than that.
    return entry.mtime_ns % 1_000_000_000 != 0 or time.time() - entry.mtime_ns / 1e9 > _COARSE


def _sealed_as(manifest: Manifest, files: bool) -> SealedAs:
    found = (RememberedFile(f.path, f.size, f.mtime_ns, f.inode, f.etag) for f in manifest.files if files)
    return SealedAs(path=manifest.path, layout=manifest.layout, bytes=manifest.bytes, files=tuple(found))


def _judged_as(verdict: Verdict) -> JudgedAs:
    return JudgedAs(
        outcome=verdict.outcome,
        checked_at=verdict.checked_at,
        place_damaged=verdict.place_damaged,
        content=verdict.content,
        reason=heaviest_reason(verdict),
    )


def _manifest(run: Run, id: CheckpointId) -> Manifest | None:
    try:
        return read_manifest(run, id)
    except RecordsError:
        return None


def _listed(run: Run) -> dict[CheckpointId, dict[str, Entry]]:
    """The records of each checkpoint: ledger entries with content by name, and the manifest."""
    found: dict[CheckpointId, dict[str, Entry]] = {}
    for series, name, entry in _records(run, LEDGER):
        standing = parse_verdict_name(series, name) if entry.size else None
        if standing is not None:
            found.setdefault(standing.id, {})[f"{LEDGER}/{name}"] = entry
    for series, name, entry in _records(run, MANIFESTS):
        id = sealed_id(series, name)
        if id is not None:
            found.setdefault(id, {})[MANIFESTS] = entry
    return found


def _records(run: Run, top: str) -> Iterator[tuple[str, str, Entry]]:
    try:
        entries = run.records.list(top, recursive=True)
    except ObjectMissingError:
        return
    for entry in entries:
        _, _, rest = entry.key.partition("/")
        folder, _, name = rest.partition("/")
        if entry.kind == "file" and name:
            yield series_from_folder(folder), name, entry
