"""What a daemon remembers of a run between two passes: some bytes for each save on record, however long it goes on."""

from __future__ import annotations

import gc
import sys
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from support.tiny_run import TINY, delete, save
from support.views import look

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.inspect.list_states import survey
from ckptguard.reporting.notify import Hooks
from ckptguard.runs import history
from ckptguard.runs.results import Checked
from ckptguard.runs.work import Work
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import run_id_of
from ckptguard.values.manifest import Manifest

SHARED = (ModuleType, type, FunctionType, MethodType, BuiltinFunctionType, Hooks)
MOST = 500  # bytes for each save: the names of its records, and what they say


def held(*roots: object) -> int:
    """Bytes of all that is reached from here and belongs to one run."""
    seen: dict[int, object] = {}
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, SHARED):
            seen[id(one)] = one
            waiting += gc.get_referents(one)
    return sum(map(sys.getsizeof, seen.values()))


def living_manifests() -> list[Manifest]:
    """Those that something still holds: what only waits for the collector is not among them."""
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, Manifest)]


def test_it_hardly_grows_with_the_saves_on_record(tmp_path):
    """A trainer keeps its newest three saves; the records of all stay, and somebody looks at the list all the time."""
    url = str(tmp_path / "run")
    watched = WatchedRun(url, run_id_of(url), TINY, Hooks(TINY, lambda *a, **k: None), None)
    sizes = {}
    for step in range(90):
        save(url, step, step + 1)
        delete(url, step - 3)
        watched.step(Work(), assume_quiet=True)
        states = survey(watched.look())
        watched.step(Work())
        sizes[step] = held(watched)
    assert len(states) == 90
    assert (sizes[89] - sizes[29]) / 60 < MOST, sizes


def test_a_pass_over_many_saves_holds_the_manifests_of_some(tmp_path, monkeypatch):
    """However many it seals: those of large checkpoints take 25 MB each."""
    url = str(tmp_path / "run")
    for step in range(12):
        save(url, step, step + 1)
    monkeypatch.setattr(history, "_MOST_MANIFESTS", 4)
    view = look(url, TINY)
    of_others = living_manifests()  # what other tests of this process left is not the pass's

    def on_verdict(checked: Checked) -> None:
        others = set(map(id, of_others))
        counts.append(len({one.id for one in living_manifests() if id(one) not in others}))

    counts: list[int] = []
    reconcile(view, PassNotes(), work=Work(on_verdict=on_verdict), assume_quiet=True)
    assert len(counts) == 12
    assert max(counts) <= 6
