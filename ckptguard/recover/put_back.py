"""Put files of kept copies or other checkpoints back: stage them, read them back, then give them their names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from ckptguard.decisions.rollback_plan import Content
from ckptguard.errors import SettingsError
from ckptguard.layouts import tops
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.run import Run
from ckptguard.runs.find_known_good import Candidate
from ckptguard.runs.lock import run_lock
from ckptguard.runs.removal import remove_temporary
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.storage.protocol import find_entry
from ckptguard.values.temporary_names import ROLLBACK
from ckptguard.verification.collect_evidence import copy_differs


@contextlib.contextmanager
def staged(run: Run, source: Candidate, content: Content, path: str, work: Work) -> Iterator[Callable[[], None] | None]:
    """Stage a checkpoint and read it back. Yields the call that publishes it under `path`, or None if its bytes are not
    the sealed ones."""
    manifest, copy = source.manifest, None if content.in_place else source.copy
    files = [f.path for f in manifest.files]
    with _copied_back(run, manifest.path, files, "" if copy is None else copy.folder + "/", path) as done:
        temporary, publish = done
        if copy_differs(run.storage, temporary + "/", manifest, scanner=work.scanner) is None:
            yield publish
            return
        yield None


@contextlib.contextmanager
def _copied_back(
    run: Run, path: str, files: Iterable[str], kept: str, name: str
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Copy files to a temporary folder of the run. Yields that folder, and the call that gives the files their `name`.

    They come from the folder `kept` of the records, or from their place in the run. They are never links: what the
    trainer does to one file must not reach another.
    """
    storage, run_prefix, records_prefix = run.shared()
    prefix, files = records_prefix + kept if kept else run_prefix, list(files)
    temporary = ROLLBACK.new()

    def publish() -> None:
        for top in tops(path, files):
            target = name if top == path else top
            storage.move(f"{run_prefix}{temporary}/{top}", run_prefix + target)

    try:
        for file in files:
            storage.copy(prefix + file, f"{run_prefix}{temporary}/{file}", how="clone")
        yield temporary, publish
    finally:
        remove_temporary(run.storage, temporary)


def restore_pending_copies(view: RunView, *, series: str) -> list[str]:
    """Copy kept copies without a verdict back to their paths if these are empty. Returns the paths.

    A trainer's rotation may have left nothing else. They stay pending there.
    """
    run = view.run
    try:
        run.shared()
    except SettingsError:
        return []
    places = []
    with run_lock(run):
        view.refresh(series)
        for id in list_kept(run):
            wanted = id.series == series and not view.history.has_verdict(id)
            copy = read_kept(run, id) if wanted else None
            if copy is None or copy.path == "." or any(find_entry(run.storage, t) for t in tops(copy.path, copy.files)):
                continue
            with _copied_back(run, copy.path, copy.files, copy.folder + "/", copy.path) as (_, publish):
                publish()
                places.append(copy.path)
    for path in places:
        view.look_again(path)
    return places
