"""Load a checkpoint verified: what is handed out are the bytes that were judged, never bytes that were read again."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from ckptguard.api.held_bytes import HeldFile, HoldingScanner
from ckptguard.api.report import incidents_of
from ckptguard.api.torch_state import Loadable, device_of, state_of
from ckptguard.checks.digests import same_content
from ckptguard.errors import ChangedWhileReadError, CouldNotTellError, RefusedError, SettingsError
from ckptguard.replicas.replicate import find_known_good_anywhere
from ckptguard.runs.find_known_good import Candidate, Wanted
from ckptguard.runs.results import Checked, VerifyReport
from ckptguard.runs.run_view import RunView
from ckptguard.runs.target import Target, resolve_target, several_checkpoints
from ckptguard.runs.work import Work
from ckptguard.scan import scanner_of
from ckptguard.storage import normalise_url
from ckptguard.values.ids import escape
from ckptguard.values.own_log import log as _log
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome, why
from ckptguard.verification.read_known_good import read_known_good
from ckptguard.verification.target import verify_target


def load_verified(target: str, step: int | None, map_location: Any, allow_suspect: bool, settings: Settings) -> Any:
    """See `ckptguard.load`."""
    device = device_of(map_location)
    resolved = resolve_target(target, settings)
    scanner = scanner_of(settings)
    if resolved.checkpoint is None and resolved.view is not None:
        wanted = Wanted(step=step, thinned=True)
        found = _KnownGood(HoldingScanner(scanner)).load(RunView(resolved.view.run, settings), wanted)
    elif resolved.checkpoint is None:
        raise several_checkpoints(resolved, target)
    elif step is not None:
        raise SettingsError("step= chooses a checkpoint of a run, and this is one checkpoint")
    else:
        found = _one(target, resolved, HoldingScanner(scanner, gathers=True), allow_suspect, settings)
    return state_of(found, device)


def _one(target: str, resolved: Target, holding: HoldingScanner, allow_suspect: bool, settings: Settings) -> Loadable:
    """A checkpoint, or the one file of it that was named; it is judged whole all the same."""
    with incidents_of(settings) as incidents:
        report = verify_target(target, settings, judged=incidents.judged, work=Work(scanner=holding.scan))
    if len(report.checkpoints) != 1:
        raise ChangedWhileReadError(f"{escape(target)} changed while it was read", key=target)
    (checked,) = report.checkpoints
    if not report.ok and not (allow_suspect and checked.outcome is Outcome.SUSPECT):
        raise _refusal(target, report, checked)
    for note in report.notes:
        _log.warning("%s", note)
    storage, found = resolved.storage, resolved.checkpoint
    assert found is not None
    named = {normalise_url(target), os.path.realpath(target) if "://" not in target else target}
    files = {key: held for (url, key), held in holding.files.items() if url == storage.url}
    if not files:  # it has become one of a run meanwhile, or another one
        raise ChangedWhileReadError(f"{escape(target)} changed while it was read", key=target)
    alone = next((key for key in files if storage.path_of(key) in named or key == found.path), None)
    return Loadable(
        layout=checked.layout,
        files={found.inside(key): held for key, held in files.items()},
        alone=None if alone is None else found.inside(alone),
    )


class _KnownGood:
    """The newest known-good checkpoint of a run, held as it was read."""

    def __init__(self, holding: HoldingScanner) -> None:
        self._holding = holding
        self._held: dict[str, Loadable] = {}

    def load(self, view: RunView, wanted: Wanted) -> Loadable:
        """In place, the kept copy, or from a replica. NoKnownGoodError if there is none that is good as it is read."""
        answer = find_known_good_anywhere(view, wanted, self._choose)
        return self._held[answer.path]

    def _choose(self, view: RunView, wanted: Wanted) -> Candidate | None:
        work = Work(scanner=self._holding.scan)
        for _ in range(2):  # what was read last may be another one: then it alone is read again
            found = read_known_good(view, wanted, work, everything=True)
            if found is None:
                return None
            files = self._files_of(view, found)
            if files is not None:
                path, manifest = found.manifest.path, found.manifest
                alone = path.rpartition("/")[2] if manifest.file(path) is not None else None
                self._held = {found.answer.path: Loadable(layout=manifest.layout, files=files, alone=alone)}
                return found
            wanted = msgspec.structs.replace(wanted, only=found.id)
        raise ChangedWhileReadError(f"{view.run.url} changed while it was read", key="")

    def _files_of(self, view: RunView, found: Candidate) -> dict[str, HeldFile] | None:
        """Its files by their names inside of it, if what is held is what was sealed."""
        manifest, storage, prefix = found.manifest, view.run.storage, ""
        if not found.in_place and found.copy is not None:
            storage, prefix = view.run.records, found.copy.folder + "/"
        files = {}
        for sealed in manifest.files:
            held = self._holding.files.get((storage.url, prefix + sealed.path))
            if held is None or not same_content(sealed, held.scanned):
                return None
            inside = sealed.path.removeprefix(manifest.path + "/") if manifest.path != "." else sealed.path
            files[inside if inside != manifest.path else inside.rpartition("/")[2]] = held
        return files


def _refusal(target: str, report: VerifyReport, checked: Checked) -> Exception:
    """Why a checkpoint is not handed out."""
    reasons = why(checked.findings)
    if report.could_not_tell or checked.outcome is Outcome.PENDING:
        return CouldNotTellError(f"{escape(target)} could not be verified: {reasons}", hint="try again")
    hint = f"see: ckptguard verify {escape(target)}; load the run for its newest good checkpoint"
    if checked.outcome is Outcome.SUSPECT:
        hint = f"see: ckptguard verify {escape(target)}; allow_suspect=True loads it all the same"
    return RefusedError(
        f"{escape(target)} is {checked.outcome.value}: {reasons}", outcome=checked.outcome.value, hint=hint
    )
