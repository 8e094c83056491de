"""Thin old good checkpoints: what only a resume needs goes to the trash, and what stays is a generation of its own.

The order keeps every moment safe. What stays is read, compared with its seal and judged. Only then the run is locked
and looked at again, the trash gets its mark, what stays is sealed, and at last the files are moved. So a thinned
checkpoint is good by its own verdict, and the whole one can be restored until its grace is over.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import msgspec

from ckptguard.layouts import Checkpoint
from ckptguard.layouts.thinning import Split, split_for_thinning, why_never
from ckptguard.records.kept import read_kept
from ckptguard.retention.prune import Pruned, ThinnedCheckpoint, to_thin
from ckptguard.retention.trash import begin_thinning, finish_thinning, moves_files
from ckptguard.runs.file_signatures import as_reported
from ckptguard.runs.lock import run_lock
from ckptguard.runs.removal_holds import pins_of
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work, noted
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.record_formats import MANIFEST
from ckptguard.values.retention_policy import Policy
from ckptguard.verification.checkpoint import Verification, judge_thinned, verify_checkpoint
from ckptguard.version import __version__

_NO_TRASH = "its files cannot be moved to the trash, as on a local disk"
_KEPT = "a protected copy of it is kept"
_CHANGED = "it changed or was put to use meanwhile"


class _Plan(msgspec.Struct, frozen=True):
    """A checkpoint to thin, and what it would become; or why it stays as it is."""

    checkpoint: Checkpoint
    id: CheckpointId
    split: Split
    becomes: Manifest | None = None

    @property
    def as_result(self) -> ThinnedCheckpoint:
        """What a dry run says of it."""
        goes, reason = self.split.goes, self.split.why
        size = sum(file.size for file in goes)
        return ThinnedCheckpoint(
            path=self.checkpoint.path, id=self.id, files=tuple(f.path for f in goes), bytes=size, reason=reason
        )


def thin(
    view: RunView, policy: Policy, *, dry_run: bool = False, work: Work = PLAIN
) -> tuple[tuple[ThinnedCheckpoint, ...], tuple[str, ...]]:
    """Thin what a policy says of what it keeps, the oldest first. Returns what was done, and problems as sentences.

    A problem with one checkpoint ends the work. So does damage, which is recorded: then nothing of it went.
    """
    done: list[ThinnedCheckpoint] = []
    troubles: list[str] = []
    if policy.thin_after is None:
        return (), ()
    with noted(troubles, "not everything was thinned"):
        for plan in _plans(view, policy):
            one = plan.as_result
            if plan.becomes is not None and not dry_run:
                if work.is_stopped() or not work.may_begin(plan.becomes.bytes):
                    break
                wrong = _take(view, policy, plan, plan.becomes, work)
                if wrong:
                    troubles.append(f"{one.path} was not thinned: {wrong}")
                    break
            done.append(one)
    if not dry_run:
        view.forget()
    return tuple(done), tuple(troubles)


def thin_too(view: RunView, pruned: Pruned, *, work: Work = PLAIN) -> Pruned:
    """Do the same after a `prune`, if nothing went wrong in it, and add it to its result."""
    if pruned.could_not_tell:
        return pruned
    done, troubles = thin(view, pruned.policy, dry_run=pruned.dry_run, work=work)
    return msgspec.structs.replace(pruned, thinned=done, could_not_tell=troubles)


def _plans(view: RunView, policy: Policy) -> Iterator[_Plan]:
    """Yield what may be thinned, oldest first, and what may not although it holds state that only a resume needs."""
    for checkpoint, id, together in to_thin(view, policy):
        sealed = view.reader.sealed(id)
        if sealed is None or not sealed.series_head.has_optimizer:
            continue
        why = together or _why_not(view, checkpoint, id)
        if why:
            yield _Plan(checkpoint, id, Split(why=why))
            continue
        manifest = view.history.manifest(id)
        split = Split() if manifest is None else split_for_thinning(manifest)
        if manifest is not None and split.goes:
            yield _Plan(checkpoint, id, split, _becomes(view, checkpoint, manifest, split))
        elif split.why:
            yield _Plan(checkpoint, id, split)


def _why_not(view: RunView, checkpoint: Checkpoint, id: CheckpointId) -> str:
    if why := why_never(checkpoint.layout):
        return why
    if not moves_files(view.run):
        return _NO_TRASH
    return "" if read_kept(view.run, id) is None else _KEPT


def _becomes(view: RunView, checkpoint: Checkpoint, manifest: Manifest, split: Split) -> Manifest:
    """Return the manifest of what stays: the next generation, saved and sealed when the whole one was."""
    there = {entry.key: entry for entry in checkpoint.entries}
    return msgspec.structs.replace(
        manifest,
        format=MANIFEST.writes,
        generation=view.new_id(checkpoint).generation,
        version=__version__,
        nonce=uuid.uuid4().hex,
        files=tuple(as_reported(file, there[file.path]) for file in split.stays),
        thinned=tuple((file.path, *there[file.path].signature) for file in split.goes),
    )


def _take(view: RunView, policy: Policy, plan: _Plan, becomes: Manifest, work: Work) -> str:
    """Thin a checkpoint. Returns what is wrong, "" for nothing; then it is as it was."""
    run, checkpoint = view.run, plan.checkpoint
    verdict = judge_thinned(view, checkpoint, becomes, work)
    if isinstance(verdict, str):
        verify_checkpoint(view, checkpoint, Verification(md5=False), work=work)  # which records it
        return verdict
    with run_lock(run):
        view.forget()  # reading took long
        may = ((one.signature, id) for one, id, why in to_thin(view, policy) if not why)
        if (checkpoint.signature, plan.id) not in may or plan.id in pins_of(run) or read_kept(run, plan.id) is not None:
            return _CHANGED
        mark = begin_thinning(run, checkpoint, plan.id, becomes) if view.new_id(checkpoint) == becomes.id else None
        if mark is None:
            return _CHANGED
        view.history.note_manifest(becomes)
        view.history.add_verdict(verdict)
        finish_thinning(run, mark)
    return ""
