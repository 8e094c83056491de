"""Thin old good checkpoints: what only a resume needs goes to the trash, and what stays is a generation of its own.

The order keeps every moment safe. Files of which only a part goes are written anew. What stays is read, compared with
its seal and judged. Only then the run is locked and looked at again, the trash gets its mark, what stays is sealed, and
at last the files are moved. So a thinned checkpoint is good by its own verdict, and the whole one can be restored until
its grace is over.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ckptguard.checks.evidence import NO_SUMS
from ckptguard.formats.structure import ReadProblem
from ckptguard.layouts import Checkpoint
from ckptguard.layouts.thinning import Anew, Split, is_in, split_for_thinning, why_never
from ckptguard.records.kept import read_kept
from ckptguard.records.run import Run
from ckptguard.retention.prune import Pruned, ThinnedCheckpoint, to_thin
from ckptguard.retention.trash import begin_thinning, finish_thinning, moves_files, settle_trash
from ckptguard.runs.file_signatures import as_reported
from ckptguard.runs.lock import run_lock
from ckptguard.runs.removal_holds import pins_of
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work, noted
from ckptguard.scan import Scan, ScannedFile, ScanOptions
from ckptguard.storage.local.mounts import mount_of
from ckptguard.upkeep.write_anew import written_anew
from ckptguard.values.ids import CheckpointId, escape
from ckptguard.values.manifest import Manifest
from ckptguard.values.record_formats import MANIFEST
from ckptguard.values.retention_policy import Policy
from ckptguard.verification.checkpoint import Verification, judge_thinned, read_what_stays, verify_checkpoint
from ckptguard.verification.collect_evidence import manifest_file, roles_of
from ckptguard.verification.found_sums import find_sums
from ckptguard.version import __version__

_NO_TRASH = "its files cannot be moved to the trash, as on a local disk"
_KEPT = "a protected copy of it is kept"
_CHANGED = "it changed or was put to use meanwhile"


class _Plan(msgspec.Struct, frozen=True):
    """A checkpoint to thin, how, and the whole of it; or why it stays as it is."""

    checkpoint: Checkpoint
    id: CheckpointId
    split: Split
    whole: Manifest | None = None

    @property
    def as_result(self) -> ThinnedCheckpoint:
        """What a dry run says of it."""
        split = self.split
        return ThinnedCheckpoint(
            path=self.checkpoint.path,
            id=self.id,
            files=tuple(file.path for file in split.takes),
            anew={one.file.path: one.bytes for one in split.anew},
            bytes=sum(file.size for file in split.goes) + sum(one.bytes for one in split.anew),
            reason=split.why,
        )


def thin(
    view: RunView,
    policy: Policy,
    *,
    dry_run: bool = False,
    work: Work = PLAIN,
    refused: dict[CheckpointId, str] | None = None,
    only: Callable[[ThinnedCheckpoint], bool] = lambda _: True,
) -> tuple[tuple[ThinnedCheckpoint, ...], tuple[str, ...]]:
    """Thin what a policy says of what it keeps, the oldest first, `only` those that may be. Returns what was done, and
    problems as sentences.

    A problem with one checkpoint ends the work. So does damage, which is recorded: then nothing of it went. Those that
    are never thinned are added to `refused`, with the reason, and are not looked at again.
    """
    done: list[ThinnedCheckpoint] = []
    troubles: list[str] = []
    refused = {} if refused is None else refused
    if policy.thin_after is None:
        return (), ()
    with noted(troubles, "not everything was thinned"):
        for plan in _plans(view, policy, refused):
            if not only(plan.as_result):
                continue
            if plan.whole is not None and not dry_run:
                if work.is_stopped() or not work.may_begin(plan.whole.bytes):
                    break
                try:
                    wrong = _take(view, policy, plan, plan.whole, work)
                except ReadProblem as error:
                    refused[plan.id] = str(error)
                    done.append(msgspec.structs.replace(plan, split=Split(why=str(error))).as_result)
                    continue
                if wrong:
                    troubles.append(f"{plan.checkpoint.path} was not thinned: {wrong}")
                    break
            done.append(plan.as_result)
    if not dry_run:
        view.forget()
    return tuple(done), tuple(troubles)


def thin_too(
    view: RunView,
    pruned: Pruned,
    *,
    work: Work = PLAIN,
    only: Callable[[ThinnedCheckpoint], bool] = lambda _: True,
) -> Pruned:
    """Do the same after a `prune`, if nothing went wrong in it, and add it to its result."""
    if pruned.could_not_tell:
        return pruned
    done, troubles = thin(view, pruned.policy, dry_run=pruned.dry_run, work=work, only=only)
    return msgspec.structs.replace(pruned, thinned=done, could_not_tell=troubles)


def _plans(view: RunView, policy: Policy, refused: dict[CheckpointId, str]) -> Iterator[_Plan]:
    """Yield what may be thinned, oldest first, and what may not although it holds state that only a resume needs."""
    for checkpoint, id, together in to_thin(view, policy):
        sealed = view.reader.sealed(id)
        if sealed is None or not sealed.series_head.has_optimizer:
            continue
        why = together or refused.get(id) or _why_not(view, checkpoint, id)
        manifest = view.history.manifest(id) if not why and id not in refused else None
        split = Split(why=why) if manifest is None else split_for_thinning(manifest)
        if manifest is not None and not split.takes:
            refused[id] = split.why
        split = _unless_summed(view, checkpoint, split)
        if split.takes or split.why:
            yield _Plan(checkpoint, id, split, manifest if split.takes else None)


def _unless_summed(view: RunView, checkpoint: Checkpoint, split: Split) -> Split:
    """Return the split, or that all stays because a checksum file is about what would go: what is left would be bad."""
    sums = find_sums(view.run.storage, checkpoint, view.sum_lists_beside(checkpoint)) if split.takes else NO_SUMS
    takes = {file.path for file in split.takes}
    about = next((one for one in sums.stated if one.file in takes), None)
    return split if about is None else Split(why=f"{escape(about.source)} states what {escape(about.file)} holds")


def _why_not(view: RunView, checkpoint: Checkpoint, id: CheckpointId) -> str:
    if why := why_never(checkpoint.layout):
        return why
    if not moves_files(view.run):
        return _NO_TRASH
    return "" if read_kept(view.run, id) is None else _KEPT


def _take(view: RunView, policy: Policy, plan: _Plan, whole: Manifest, work: Work) -> str:
    """Thin a checkpoint. Returns what is wrong, "" for nothing; then it is as it was. Raises ReadProblem if a file
    cannot be written anew."""
    run, checkpoint = view.run, plan.checkpoint
    _refuse_unmovable(run, plan.split)
    with written_anew(view, plan.split, work) as (staged, split):
        before = _structures(view, split, work)
        scan = read_what_stays(view, checkpoint, [file.path for file in split.stays], staged, work)
        becomes = _becomes(view, checkpoint, whole, split, scan)
        wrong = (_lost(old, one, scan) for old, one in zip(before, split.anew, strict=True))
        verdict = next(filter(None, wrong), "") or judge_thinned(view, checkpoint, becomes, scan)
        if isinstance(verdict, str):
            verify_checkpoint(view, checkpoint, Verification(md5=False), work=work)  # which records it
            return verdict
        with run_lock(run):
            settle_trash(run)  # of a process that was killed in a thinning
            view.forget()  # reading took long
            may = ((one.signature, id) for one, id, why in to_thin(view, policy) if not why)
            is_held = plan.id in pins_of(run) or read_kept(run, plan.id) is not None
            if is_held or (checkpoint.signature, plan.id) not in may or view.new_id(checkpoint) != becomes.id:
                return _CHANGED
            mark = begin_thinning(run, checkpoint, plan.id, becomes, staged)
            if mark is None:
                return _CHANGED
            view.history.note_manifest(becomes)
            view.history.add_verdict(verdict)
            finish_thinning(run, mark, becomes)
    return ""


def _refuse_unmovable(run: Run, split: Split) -> None:
    """Raise ReadProblem if files cannot be renamed between the checkpoint and the trash: once what stays is sealed, the
    thinning could not end."""
    root, mount = run.storage.root or "", mount_of(os.path.realpath(run.records.root or ""))
    for folder in sorted({file.path.rpartition("/")[0] for file in split.takes}):
        place = os.path.realpath(os.path.join(root, folder))
        if not os.access(place, os.W_OK | os.X_OK) or mount_of(place) != mount:
            raise ReadProblem(f"nothing can be moved from {escape(folder) or 'the folder of the run'} to the trash")


def _structures(view: RunView, split: Split, work: Work) -> Sequence[ScannedFile]:
    """Return the structure of the files that are written anew, as they are in place."""
    paths = [one.file.path for one in split.anew]
    return work.scanner(view.run.storage, paths, ScanOptions(structure_only=True), None).files if paths else ()


def _becomes(view: RunView, checkpoint: Checkpoint, whole: Manifest, split: Split, scan: Scan) -> Manifest:
    """Return the manifest of what stays: the next generation, saved and sealed when the whole one was."""
    there, roles = {entry.key: entry for entry in checkpoint.entries}, roles_of(scan.files)
    anew = {one.file.path for one in split.anew}
    files = {file.path: as_reported(file, there[file.path]) for file in split.stays}
    files |= {f.entry.key: manifest_file(f, roles[f.entry.key]) for f in scan.files if f.entry.key in anew}
    return msgspec.structs.replace(
        whole,
        format=MANIFEST.writes,
        generation=view.new_id(checkpoint).generation,
        version=__version__,
        nonce=uuid.uuid4().hex,
        files=tuple(files[file.path] for file in whole.files if file.path in files),
        thinned=tuple((file.path, *there[file.path].signature) for file in split.takes),
    )


def _lost(before: ScannedFile, one: Anew, scan: Scan) -> str:
    """Return what a file that was written anew lacks, or has besides, "" if all that stays is as it was sealed."""
    path, now = one.file.path, scan.file(one.file.path)
    if now is None:
        return "" if not one.tensors else f"{escape(path)} was not written"
    sealed = {
        (t.name, t.dtype, t.shape, None if t.span is None else one.file.spans[t.span].blake3) for t in one.tensors
    }
    digests = (None if t.span is None else now.span_digests[t.span] for t in now.structure.tensors)
    found = {(t.name, t.dtype, t.shape, digest) for t, digest in zip(now.structure.tensors, digests, strict=True)}
    if sealed != found:
        names = sorted(name for name, *_ in sealed ^ found)
        return f"{escape(names[0])} in {escape(path)} differs from what was sealed"
    for old, new in ((before.structure.leaves, now.structure.leaves), (before.structure.unread, now.structure.unread)):
        kept = {str(value) for value in old if not is_in(getattr(value, "name", str(value)), one.places)}
        if not kept <= {str(value) for value in new}:
            return f"numbers in {escape(path)} differ from what was there"
    return ""
