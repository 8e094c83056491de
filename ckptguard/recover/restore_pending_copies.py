"""Put back what was protected and deleted before anybody had verified it: so that it can be verified after all."""

from __future__ import annotations

import uuid

from ckptguard.errors import ObjectMissingError, SettingsError
from ckptguard.layouts import tops
from ckptguard.records.kept import KeptCopy, list_kept, read_kept
from ckptguard.records.run import Run
from ckptguard.runs.history import load_history
from ckptguard.runs.lock import run_lock


def put_back_pending(run: Run, *, series: str, before_step: int | None = None) -> list[str]:
    """Copy kept copies without a verdict back to their places, where those are empty; returns the places.

    For a trainer's rotation may have left nothing else. They are pending there like any other save.
    """
    try:
        storage, run_prefix, records_prefix = run.shared()
    except SettingsError:
        return []
    places = []
    with run_lock(run):
        known = load_history(run).standings(series)
        for found, step, generation in list_kept(run):
            copy = read_kept(run, series, step, generation) if found == series else None
            wanted = step is not None and (before_step is None or step < before_step)
            if copy is None or not wanted or (step, generation) in known or not _is_free(run, copy):
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
    return places


def _is_free(run: Run, copy: KeptCopy) -> bool:
    for top in tops(copy.path, copy.files):
        try:
            run.storage.stat(top)
        except ObjectMissingError:
            continue
        return False
    return copy.path != "."
