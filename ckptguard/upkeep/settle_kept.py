"""Kept copies in a pass: made before a verdict, for the trainer may delete a save at any moment; then settled by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ckptguard.errors import BusyError, CouldNotTellError, ObjectMissingError
from ckptguard.keep.copies import keep_checkpoint, release, release_unpinned, trim_kept
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import kept_matches, made_of_sealed
from ckptguard.values.ids import CheckpointId, Step, numbers_of
from ckptguard.values.verdict import Outcome
from ckptguard.verify.collect_evidence import unfinished_because


def protect_finished(view: RunView) -> list[str]:
    """Protect the saves that are finished and have no verdict, for a trainer that knows that one is; returns sentences
    about what went wrong."""
    newest = sorted(view.checkpoints, key=lambda c: numbers_of(c.step), reverse=True)[: view.settings.keep_pending]
    return protect(view, [c for c in newest if unfinished_because(view.run.storage, c) is None])


def protect(view: RunView, finished: Iterable[Checkpoint]) -> list[str]:
    """Keep finished saves that have no verdict, the newest `keep_pending` of each series; returns sentences about what
    went wrong. What was sealed before and changed is not kept: it may be damage."""
    if view.settings.keep == "none":
        return []
    troubles: list[str] = []
    kept: Counter[str] = Counter()
    for checkpoint in sorted(finished, key=lambda c: (numbers_of(c.step), c.path), reverse=True):
        if kept[checkpoint.series] >= view.settings.keep_pending:
            continue
        try:
            kept[checkpoint.series] += _protect(view, checkpoint)
        except ObjectMissingError:
            continue  # rotated away under our hands
        except (BusyError, CouldNotTellError) as error:
            troubles.append(f"{checkpoint.path} could not be kept: {error.message}")
    return troubles


def _protect(view: RunView, checkpoint: Checkpoint) -> bool:
    """Keep one of them; whether it has a copy that waits for its verdict."""
    current = view.current_if_readable(checkpoint)
    if current is not None and not LAYOUTS[checkpoint.layout].sealed_by_writer:
        return False
    id = current or view.history.next_id(checkpoint.series, checkpoint.step)
    with run_lock(view.run):
        copy = keep_checkpoint(view, checkpoint, id)
        trim_kept(view)
    return copy is not None and not view.history.has_verdict(id)


def settle_kept(view: RunView) -> list[str]:
    """Have exactly those kept copies that the verdicts ask for; returns sentences about what went wrong."""
    try:
        with run_lock(view.run):
            _release_refuted(view)
            for checkpoint, id in list(_good_without_copy(view)):
                keep_checkpoint(view, checkpoint, id)
            trim_kept(view)
    except (BusyError, CouldNotTellError) as error:
        return [f"kept copies could not be looked after: {error.message}"]
    return []


def _release_refuted(view: RunView) -> None:
    """Release copies whose content is not, or is no longer, what a verdict calls good."""
    run, unwanted = view.run, []
    for id in list_kept(run):
        copy = read_kept(run, id)
        if copy is None or not view.history.has_verdict(id):
            continue
        manifest = view.history.manifest(id)
        of_sealed = manifest is not None and made_of_sealed(copy, manifest)
        if manifest is not None and of_sealed and kept_matches(run, copy, manifest) and view.is_good(id):
            continue
        if read_kept(run, id) != copy:
            continue  # its mark read wrong once, and it may be the last whole copy: the next pass looks again
        if manifest is not None and not of_sealed:
            release(run, id)  # pinned or not: what is pinned is the content that was sealed
        else:
            unwanted.append(id)
    release_unpinned(run, unwanted)


def _good_without_copy(view: RunView) -> Iterator[tuple[Checkpoint, CheckpointId]]:
    """What lies in place, of the newest `keep_good` good checkpoints of each series, and has no copy."""
    listed = set(list_kept(view.run))
    in_place: dict[str, dict[Step, list[Checkpoint]]] = {}
    for checkpoint in view.checkpoints:
        in_place.setdefault(checkpoint.series, {}).setdefault(checkpoint.step, []).append(checkpoint)
    for series, by_step in in_place.items():
        standings = view.history.standings(series).values()
        good = [s.id for s in standings if s.outcome is Outcome.GOOD]
        left = view.settings.keep_good
        for id in sorted(good, key=lambda id: id.order, reverse=True):
            if left <= 0:
                break
            if id in listed and read_kept(view.run, id) is not None:
                left -= 1
                continue
            own = (c for c in by_step.get(id.step, ()) if view.current_if_readable(c) == id)
            found = next((c for c in own if looks_as_judged(view, c, id)), None)
            if found is not None:  # many may be gone: only those that are somewhere count
                left -= 1
                yield found, id


def looks_as_judged(view: RunView, checkpoint: Checkpoint, id: CheckpointId) -> bool:
    """Whether its files look as they did when this generation was judged: another content would be no copy of it."""
    manifest, verdict = view.history.manifest(id), view.history.verdict(id)
    return manifest is not None and verdict is not None and looks_as_read(checkpoint.entries, manifest, verdict)
