"""Roll back: quarantine what is newer than known-good, and have the known-good in place under its own name."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterator

import msgspec

from ckptguard.decisions.known_good import choose_known_good
from ckptguard.errors import BusyError, CouldNotTellError, NoKnownGoodError
from ckptguard.keep.copies import put_aside
from ckptguard.keep.quarantine import mark_suspect, move_aside, quarantine_checkpoint
from ckptguard.layouts import LAYOUTS, Checkpoint, tops
from ckptguard.records.pins import InUse
from ckptguard.records.run import Run
from ckptguard.recover.rewrite_pointers import point_back
from ckptguard.runs.find_known_good import Candidate, KnownGood, known_good_candidates, none_found
from ckptguard.runs.history import History, load_history
from ckptguard.runs.listing import find_checkpoint, list_checkpoints
from ckptguard.runs.lock import run_lock
from ckptguard.runs.sealed_content import is_good
from ckptguard.runs.settling import youngest_age
from ckptguard.scan import Scanner, scan_files
from ckptguard.values.ids import parse_id
from ckptguard.values.manifest import File, Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verify.checkpoint import verify_checkpoint
from ckptguard.verify.collect_evidence import unfinished_because
from ckptguard.verify.compare_copy import copy_differs
from ckptguard.verify.seal import seal_written


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollback did, or would do. `known_good` is in place afterwards; `quarantined` are paths in the run."""

    known_good: KnownGood
    quarantined: tuple[str, ...]
    put_back: bool
    dry_run: bool
    unverified: tuple[str, ...] = ()  # with dry_run: newer checkpoints that would be verified first


def roll_back(
    run: Run,
    settings: Settings,
    *,
    reason: str,
    before_step: int | None = None,
    to_id: str | None = None,
    series: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    check_writing: bool = True,
    read_back: bool = True,
    in_use: InUse | None = None,
    scanner: Scanner = scan_files,
) -> RolledBack:
    """Go back to the newest known-good checkpoint (before `before_step`, or to `to_id`), which is read and verified
    first: one that fails is recorded BAD and the next older one is taken. Newer checkpoints without a verdict are
    verified before that, newest first, until one is GOOD.

    Without `read_back` one that lies in place is taken at its verdict: for a caller that reads it next and holds
    every byte against the manifest. What is gone back to is pinned by `in_use`, if given beyond the end of this.

    Newer checkpoints of the series are quarantined, the GOOD ones as SUSPECT. The known-good is put back from its
    kept copy with fresh times where it is not in place. BusyError if training is still writing (`check_writing`, not
    with `force`) or another process holds the run; NoKnownGoodError if nothing good is left.
    """
    with contextlib.ExitStack() as held:
        if in_use is None:
            in_use = held.enter_context(InUse(run, "a rollback"))
        held.enter_context(run_lock(run))
        if check_writing and not force:
            _refuse_while_writing(run, settings)
        unverified = verify_pending(
            run, settings, before_step=before_step, series=series, dry_run=dry_run or to_id is not None, scanner=scanner
        )
        chosen = _choose(
            run,
            settings,
            before_step=before_step,
            to_id=to_id,
            series=series,
            dry_run=dry_run,
            read_back=read_back,
            in_use=in_use,
            scanner=scanner,
        )
        history = load_history(run)
        newer = _newer(run, chosen)
        if not dry_run:
            # The copy is staged and read back first: if that fails (a full disk), nothing was moved.
            with _staged(run, chosen, scanner) as publish:
                for checkpoint in newer:
                    current = history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path)
                    if current == chosen.key and checkpoint.path == chosen.manifest.path:
                        move_aside(run, checkpoint, chosen.key)
                    else:
                        quarantine_checkpoint(run, history, checkpoint, reason=reason)
                _suspect_copies(run, history, chosen, before_step, reason)
                publish()
            point_back(run, chosen.manifest.path, {c.path for c in list_checkpoints(run)})
        answer = chosen.answer
        if not chosen.in_place and not dry_run:
            answer = _arrived(run, settings, chosen, scanner)
            in_use.pin(answer.series, parse_id(answer.id) or chosen.key)
        return RolledBack(
            known_good=answer,
            quarantined=tuple(c.path for c in newer),
            put_back=not chosen.in_place,
            dry_run=dry_run,
            unverified=tuple(unverified),
        )


def verify_pending(
    run: Run,
    settings: Settings,
    *,
    before_step: int | None = None,
    series: str | None = None,
    exclude: Collection[str] = (),
    dry_run: bool = False,
    scanner: Scanner = scan_files,
) -> list[str]:
    """Verify checkpoints that have no verdict and are newer than the known-good one, newest first, until one is
    GOOD. Ids in `exclude` are not known-good. Returns the paths that still have none (with `dry_run`: all of them).
    Raises nothing about their bytes."""
    history = load_history(run)
    known = known_good_candidates(run, history, before_step=before_step, series=series, exclude=exclude, most=1)
    floor = (known[0].key[0] or 0) if known else -1
    left = []
    found = [c for c in list_checkpoints(run) if c.step is not None and (series is None or c.series == series)]
    for checkpoint in sorted(found, key=lambda c: c.step or 0, reverse=True):
        step = checkpoint.step or 0
        if step <= floor or (before_step is not None and step >= before_step):
            continue
        key = history.current_if_readable(checkpoint.series, step, checkpoint.path)
        if key is not None and key in history.standings(checkpoint.series):
            continue
        left.append(checkpoint.path)
        try:
            if dry_run or unfinished_because(run.storage, checkpoint, scanner=scanner) is not None:
                continue
            if verify_checkpoint(run, checkpoint, settings, scanner=scanner).outcome is Outcome.GOOD:
                floor = step
            left.pop()
        except CouldNotTellError:
            continue
    return left


def _choose(
    run: Run,
    settings: Settings,
    *,
    before_step: int | None,
    to_id: str | None,
    series: str | None,
    dry_run: bool,
    read_back: bool,
    in_use: InUse,
    scanner: Scanner,
) -> Candidate:
    """The best candidate whose bytes are right now. Damage found on the way is recorded."""
    refused: set[str] = set()
    unsure: CouldNotTellError | None = None
    while True:
        history = load_history(run)
        found = known_good_candidates(run, history, before_step=before_step, series=series, exclude=refused)
        if to_id is not None:
            found = [c for c in found if c.answer.id == to_id]
        if not found:
            if unsure is not None:
                raise unsure
            if to_id is None:
                raise none_found(run, before_step)
            raise NoKnownGoodError(f"{run.url} has no known-good checkpoint {to_id} to go back to")
        candidate = found[0]
        if not dry_run:
            in_use.pin(candidate.answer.series, candidate.key)
        if candidate.in_place and not read_back and find_checkpoint(run, candidate.manifest.path) is not None:
            return candidate
        try:
            usable = _usable(run, settings, candidate, dry_run=dry_run, scanner=scanner)
        except CouldNotTellError as error:
            usable, unsure = None, error  # it says nothing about the bytes: take an older one, record nothing
        if usable is not None:
            return usable
        refused.add(candidate.answer.id)
        if to_id is None and not dry_run:  # older ones were left unverified because of it
            verify_pending(run, settings, before_step=before_step, series=series, exclude=refused, scanner=scanner)


def _usable(run: Run, settings: Settings, candidate: Candidate, *, dry_run: bool, scanner: Scanner) -> Candidate | None:
    """The candidate, if its bytes in place or in its copy are right now."""
    if candidate.in_place:
        checkpoint = find_checkpoint(run, candidate.manifest.path)
        if checkpoint is not None:
            checked = verify_checkpoint(run, checkpoint, settings, scanner=scanner, md5=False, record=not dry_run)
            if checked.outcome is Outcome.GOOD and checked.id == candidate.answer.id:
                return candidate
    if candidate.copy is not None:
        prefix = candidate.copy.folder + "/"
        if copy_differs(run.records, prefix, candidate.manifest, scanner=scanner) is None:
            return msgspec.structs.replace(candidate, in_place=False)
        if not dry_run:
            put_aside(run, candidate.copy)
    return None


def _newer(run: Run, chosen: Candidate) -> list[Checkpoint]:
    """What must go: higher steps of the series, and whatever else lies where the known-good belongs."""
    step = chosen.key[0] or 0
    newer = []
    for checkpoint in list_checkpoints(run):
        if checkpoint.series != chosen.answer.series:
            continue
        in_the_way = checkpoint.path == chosen.manifest.path and not chosen.in_place
        if (checkpoint.step is not None and checkpoint.step > step) or in_the_way:
            newer.append(checkpoint)
    return sorted(newer, key=lambda c: -(c.step or 0))


def _suspect_copies(run: Run, history: History, chosen: Candidate, before_step: int | None, reason: str) -> None:
    """What is newer and was rotated away has no place to be moved from; its kept copy is as suspect. So is what a
    replica may hold of what was saved from `before_step` on."""
    series, step = chosen.answer.series, chosen.key[0] or 0
    suspects = {c.key for c in known_good_candidates(run, history, series=series) if (c.key[0] or 0) > step}
    if before_step is not None:
        on_record = choose_known_good({series: history.names.get(series, ())})
        suspects |= {(s.step, s.generation) for _, s in on_record if (s.step or 0) >= before_step}
    for key in sorted(suspects, key=lambda k: (k[0] or 0, k[1])):
        if is_good(history, series, key):
            mark_suspect(run, history, series, key, reason)


def _arrived(run: Run, settings: Settings, chosen: Candidate, scanner: Scanner) -> KnownGood:
    """The known-good as it stands after it was put back: verified in its place. Where another generation lay there
    (and was quarantined) it is a new generation with the old bytes."""
    _seal_again(run, chosen.manifest)
    path = chosen.manifest.path
    checkpoint = find_checkpoint(run, path)
    if checkpoint is None:
        raise CouldNotTellError(f"{path} vanished after it was put back")
    checked = verify_checkpoint(run, checkpoint, settings, scanner=scanner, md5=False)
    if checked.outcome is not Outcome.GOOD or checked.id is None:
        raise CouldNotTellError(f"{path} is {checked.outcome.value} after it was put back")
    return msgspec.structs.replace(chosen.answer, path=run.usable(path), kept=False, id=checked.id)


def _seal_again(run: Run, manifest: Manifest) -> None:
    """What was put back in the place of a quarantined checkpoint is a generation of its own. Where only the writer
    seals, nobody else would ever seal it: it gets the manifest against which its bytes were just held."""
    if not LAYOUTS[manifest.layout].sealed_by_writer or manifest.step is None:
        return
    if load_history(run).current(manifest.series, manifest.step, manifest.path) is None:
        files = tuple(_as_stored(run, f) for f in manifest.files)
        seal_written(
            run,
            path=manifest.path,
            layout=manifest.layout,
            step=manifest.step,
            files=files,
            metrics=manifest.given_metrics(),
        )


def _as_stored(run: Run, file: File) -> File:
    entry = run.storage.stat(file.path)
    return msgspec.structs.replace(file, mtime_ns=entry.mtime_ns, inode=entry.inode, etag=entry.etag)


@contextlib.contextmanager
def _staged(run: Run, chosen: Candidate, scanner: Scanner) -> Iterator[Callable[[], None]]:
    """Copy the kept files to a temporary name and read them back; the call given gives them their own name.

    A reflink or a copy, never a link: what the trainer does to the file must not reach the kept copy. Nothing is to
    be done where the known-good is in place.
    """
    copy = chosen.copy
    if chosen.in_place or copy is None:
        yield lambda: None
        return
    storage, run_prefix, records_prefix = run.shared()
    temporary = f"tmp-rollback-{uuid.uuid4().hex[:8]}"

    def publish() -> None:
        for top in tops(copy.path, copy.files):
            storage.move(f"{run_prefix}{temporary}/{top}", run_prefix + top)

    try:
        for file in copy.files:
            storage.copy(f"{records_prefix}{copy.key(file)}", f"{run_prefix}{temporary}/{file}", how="clone")
        wrong = copy_differs(run.storage, temporary + "/", chosen.manifest, scanner=scanner)
        if wrong:
            raise CouldNotTellError(f"the kept copy could not be put back: {wrong}")
        yield publish
    finally:
        run.storage.remove(temporary)


def _refuse_while_writing(run: Run, settings: Settings) -> None:
    for checkpoint in list_checkpoints(run):
        age = youngest_age(checkpoint)
        if age is not None and age < settings.settle:
            raise BusyError(
                f"{checkpoint.path} was written {age:.1f} s ago: training may still be running",
                hint="stop training first, or use --force",
            )
        recent = age is None or age < settings.unfinished_limit
        why = unfinished_because(run.storage, checkpoint) if recent else None
        if why is not None:
            raise BusyError(f"{checkpoint.path} is unfinished ({why})", hint="stop training first, or use --force")
