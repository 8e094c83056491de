"""What asking for the known-good checkpoint of very many costs on storage, and that it says what it always said."""

from __future__ import annotations

import collections
import contextlib
from unittest import mock

import pytest
from support.tiny_run import TINY, delete, inline, name_of, rot, save
from support.views import look

from benchmarks.bench_known_good import counted, write_run
from ckptguard.errors import NoKnownGoodError
from ckptguard.inspect.list_states import survey, undecided
from ckptguard.records.run import open_run
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs.find_known_good import Wanted, find_known_good, known_good_candidates, openable
from ckptguard.runs.history import names_alone
from ckptguard.runs.work import Work
from ckptguard.storage.remote.remote_storage import RemoteStorage
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A run of ten thousand checkpoints."""
    root = tmp_path_factory.mktemp("large") / "run"
    root.mkdir()
    write_run(root, 10000, files=3)
    return root


def test_one_listing_and_two_reads(large):
    """Beside opening the run: its format and that it is there. The files' presence is asked for one by one."""
    run = open_run(str(large))
    with counted() as counts:
        known = find_known_good(run)
    assert str(known.id) == "10000.1"
    assert counts == {"names": 1, "open": 2, "stat": 2}


def test_before_a_step(large):
    """As many for any step: others are not looked at."""
    run = open_run(str(large))
    with counted() as counts:
        known = find_known_good(run, before_step=9999)
    assert str(known.id) == "9998.1"
    assert counts == {"names": 1, "open": 2, "stat": 2}


def test_in_memory_too(tmp_path):
    """An object store is asked no more: what a listing of names is there."""
    url = f"memory://costs-{tmp_path.name}"
    for step in (100, 200, 300):
        save(url, step, step)
        reconcile(look(open_run(url), TINY), PassNotes(), work=Work(scanner=inline))
    run, counts = open_run(url), collections.Counter()
    with contextlib.ExitStack() as stack:
        for name in ("list", "open"):
            real = getattr(RemoteStorage, name)

            def call(*args, name=name, real=real, **kwargs):
                counts[name] += 1
                return real(*args, **kwargs)

            stack.enter_context(mock.patch.object(RemoteStorage, name, call))
        assert str(find_known_good(run).id) == "300.1"
    assert counts == {"list": 1, "open": 2}


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_it_is_the_first_of_the_candidates(kind, tmp_path):
    """By names step by step, or all at once: what is gone, damaged, kept, suspect, saved again or in quarantine."""
    url = f"memory://first-{tmp_path.name}" if kind == "memory" else str(tmp_path / "run")

    def same():
        run = open_run(url)
        for before in (None, 100, 101, 300, 500, 10**12):
            for series in (None, "model-#", "other-#"):
                wanted = Wanted(before_step=before, series=series, sure=True)
                found = list(known_good_candidates(look(run), wanted))
                try:
                    said = find_known_good(run, before_step=before, series=series)
                except NoKnownGoodError:
                    assert found == []
                else:
                    assert said == openable(found[0].answer)
        states = [s for s in survey(look(run)) if s.in_place and (s.outcome is Outcome.PENDING or s.changed)]
        for above in (-1, 200, 400, 10**6):
            numbered = [c for c in look(run).checkpoints if c.step is not None and c.step > above]
            unjudged = [c.path for c in undecided(names_alone(run), numbered)]
            assert unjudged == sorted(s.path for s in states if s.step is not None and s.step > above)
        return [str(c.id) for c in known_good_candidates(look(run))]

    for step in (100, 200, 300, 400, 500):
        save(url, step, step)
        reconcile(look(open_run(url), TINY), PassNotes(), work=Work(scanner=inline))
        same()
    delete(url, 500)
    assert same()[0] == "500.1"
    rot(url, f"{name_of(400)}/model.safetensors")
    view = look(url, TINY)
    verify_checkpoint(view, view.checkpoint(name_of(400)), work=Work(scanner=inline))
    assert same()[:2] == ["500.1", "400.1"]
    roll_back(
        look(open_run(url), TINY),
        GoBack(reason="loss", before_step=500, check_writing=False),
        work=Work(scanner=inline),
    )
    assert same()[0] == "400.1"
    save(url, 400, 7)
    save(url, 700, 7)
    same()
    delete(url, 700)
    reconcile(look(open_run(url), TINY), PassNotes(), work=Work(scanner=inline))
    assert same()[0] == "400.2"
    for step in (100, 200, 300, 400):
        delete(url, step)
    same()
    run = open_run(url)
    run.records.create("ledger/model-#/000000000900.1.0001.good.json", b"")
    same()
    run.records.create("ledger/-/x", b"{}")
    run.records.create("ledger/model-#/-.1.0001.good.json", b"{}")
    same()
