"""Put back what was protected and deleted before anybody had verified it: so that it can be verified after all."""

from __future__ import annotations

import uuid

from ckptguard.errors import ObjectMissingError, SettingsError
from ckptguard.layouts import tops
from ckptguard.records.kept import KeptCopy, list_kept, read_kept
from ckptguard.records.run import Run
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_view import RunView


def restore_pending_copies(view: RunView, *, series: str, before_step: int | None = None) -> list[str]:
    """Copy kept copies without a verdict back to their places, where those are empty; returns the places.

    For a trainer's rotation may have left nothing else. They are pending there like any other save.
    """
    run = view.run
    try:
        storage, run_prefix, records_prefix = run.shared()
    except SettingsError:
        return []
    places = []
    with run_lock(run):
        view.refresh(series)
        for id in list_kept(run):
            wanted = id.series == series and id.step is not None and (before_step is None or id.step < before_step)
            copy = read_kept(run, id) if wanted and not view.history.has_verdict(id) else None
            if copy is None or not _is_free(run, copy):
                continue
            temporary = f"tmp-rollback-{uuid.uuid4().hex[:8]}"
            try:
                for file in copy.files:
                    source, target = f"{records_prefix}{copy.key(file)}", f"{run_prefix}{temporary}/{file}"
                    storage.copy(source, target, how="clone")
                for top in tops(copy.path, copy.files):
                    storage.move(f"{run_prefix}{temporary}/{top}", run_prefix + top)
                places.append(copy.path)
            finally:
                run.storage.remove(temporary)
    for path in places:
        view.look_again(path)
    return places


def _is_free(run: Run, copy: KeptCopy) -> bool:
    for top in tops(copy.path, copy.files):
        try:
            run.storage.stat(top)
        except ObjectMissingError:
            continue
        return False
    return copy.path != "."
