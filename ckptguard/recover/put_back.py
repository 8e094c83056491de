"""Put files of kept copies or other checkpoints back: stage them, read them back, then give them their names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ckptguard.decisions.rollback_plan import Content
from ckptguard.layouts import tops
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.run import Run
from ckptguard.runs.find_known_good import Candidate
from ckptguard.runs.lock import run_lock
from ckptguard.runs.publish import Place, copy_within, give_names, staging
from ckptguard.runs.removal import remove_empty_folders
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.storage.protocol import find_entry
from ckptguard.values.temporary_names import ROLLBACK
from ckptguard.verification.collect_evidence import copy_differs

Publish = Callable[[str], None]  # gives a staged checkpoint its name


@contextlib.contextmanager
def staged(run: Run, source: Candidate, content: Content, work: Work) -> Iterator[Publish | None]:
    """Stage a checkpoint and read it back. Yields the call that publishes it under a path, or None if its bytes are not
    the sealed ones."""
    manifest, copy = source.manifest, None if content.in_place else source.copy
    place = Place(run.storage) if copy is None else Place(run.records, copy.folder + "/")
    with _copied(run, manifest.path, [f.path for f in manifest.files], place) as (temporary, publish):
        wrong = copy_differs(run.storage, temporary.prefix, manifest, scanner=work.scanner)
        yield publish if wrong is None else None


@contextlib.contextmanager
def _copied(run: Run, path: str, files: Sequence[str], place: Place) -> Iterator[tuple[Place, Publish]]:
    """Copy a checkpoint's files to a temporary place of the run. Yields that place, and the call that publishes them.

    They are never links: what the trainer does to one file must not reach another.
    """

    def publish(name: str) -> None:
        lies = find_entry(run.storage, name) if path not in files else None
        if lies is not None and lies.kind == "folder":  # a rotation may leave it without its files
            remove_empty_folders(run.storage, name)
        give_names(temporary, [(top, name if top == path else top) for top in tops(path, files)])

    with staging(run.storage, ROLLBACK) as at:
        temporary = at.place
        for file in files:
            copy_within(run, place, temporary, file, how="clone")
        yield temporary, publish


def restore_pending_copies(view: RunView, *, series: str) -> list[str]:
    """Copy kept copies without a verdict back to their paths if these are empty. Returns the paths.

    A trainer's rotation may have left nothing else. They stay pending there.
    """
    run = view.run
    if not run.has_shared:
        return []
    places = []
    with run_lock(run):
        view.refresh(series)
        for id in list_kept(run):
            wanted = id.series == series and not view.history.has_verdict(id)
            copy = read_kept(run, id) if wanted else None
            if copy is None or copy.path == "." or any(find_entry(run.storage, t) for t in tops(copy.path, copy.files)):
                continue
            with _copied(run, copy.path, copy.files, Place(run.records, copy.folder + "/")) as (_, publish):
                publish(copy.path)
                places.append(copy.path)
    for path in places:
        view.look_again(path)
    return places
