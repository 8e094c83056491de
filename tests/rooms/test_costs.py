"""What is asked of storage for one checkpoint does not depend on how many others there are."""

from __future__ import annotations

import collections
from pathlib import Path

import fsspec
import pytest
from support.counting_storage import CountingStorage, counted
from support.records_on_disk import key_of
from support.tiny_run import TINY, cycle, delete, files_of_manifest, forget, inline, memory_path, name_of, save

import ckptguard.records.run
import ckptguard.runs.target
from benchmarks.bench_known_good import write_run
from ckptguard.inspect.show import show
from ckptguard.keep.copies import keep_checkpoint
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs.find_known_good import Wanted, find_known_good, newest_candidate
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.storage import open_storage
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint
from ckptguard.verification.seal import seal_written

COUNTS = (20, 100, 400)
MOST = 1.2  # times the requests of the smallest run
WORK = Work(scanner=inline)
VERBS = (
    *("known-good", "known-good before", "newest candidate", "show", "verify", "verify again", "keep", "seal"),
    *("restore", "restore a step", "roll back to a step", "roll back", "put back"),
)


def build(url: str, root: Path, count: int) -> None:
    """A run of so many good checkpoints."""
    root.mkdir(parents=True)
    write_run(root, count)
    if url.startswith("memory://"):
        for path in root.rglob("*"):
            if path.is_file():
                key = f"{memory_path(url)}/{key_of(root, path)}"
                fsspec.filesystem("memory").pipe_file(key, path.read_bytes())
        cycle(open_run(url), TINY.changed(keep="none"))  # what has other times is read once


def ask(url: str, count: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, collections.Counter[str]]:
    """The requests of each verb."""
    run, requests = counted(open_run(url, TINY))
    asked: dict[str, collections.Counter[str]] = {}
    latest = count + 1

    def fresh() -> RunView:
        requests.clear()
        return RunView(run, TINY)

    def done(verb: str) -> None:
        asked[verb] = collections.Counter(requests)

    fresh()
    assert find_known_good(run).step == count
    done("known-good")
    fresh()
    assert find_known_good(run, before_step=10).step == 9
    done("known-good before")
    candidate = newest_candidate(fresh(), Wanted(before_step=10))
    assert candidate is not None
    assert candidate.id.step == 9
    done("newest candidate")

    with monkeypatch.context() as patch:
        for module in (ckptguard.runs.target, ckptguard.records.run):
            patch.setattr(
                module, "open_storage", lambda *a, **kw: CountingStorage(open_storage(*a, **kw), "shown", requests)
            )
        requests.clear()
        assert show(run.usable(name_of(7)), TINY).id == CheckpointId("model-#", 7, 1)
        done("show")

    save(url, latest, latest)
    for verb in ("verify", "verify again"):
        view = fresh()
        checkpoint = view.checkpoint(name_of(latest))
        assert checkpoint is not None
        checked = verify_checkpoint(view, checkpoint, work=WORK)
        assert checked.outcome is Outcome.GOOD
        done(verb)
    view = fresh()
    assert checked.id is not None
    assert keep_checkpoint(view, checkpoint, checked.id) is not None
    done("keep")
    fresh()
    written = files_of_manifest(name_of(latest + 1), 1)
    seal_written(run, path=name_of(latest + 1), layout="folder", step=latest + 1, files=written)
    done("seal")
    assert restore(fresh(), str(out / "newest"), work=WORK).step == latest
    done("restore")
    assert restore(fresh(), str(out / "old"), step=5, work=WORK).step == 5
    done("restore a step")
    delete(url, latest)
    assert roll_back(fresh(), GoBack(reason="lost", check_writing=False), work=WORK).put_back
    done("put back")
    back = GoBack(reason="loss", to_id=checked.id, check_writing=False)
    assert roll_back(fresh(), back, work=WORK).known_good.step == latest
    done("roll back to a step")
    back = GoBack(reason="loss", before_step=latest, check_writing=False)
    assert roll_back(fresh(), back, work=WORK).quarantined == (name_of(latest),)
    done("roll back")
    return asked


@pytest.fixture(scope="module", params=["local", "memory"])
def costs(request, tmp_path_factory):
    """The requests of each verb, by the number of checkpoints."""
    found = {}
    for count in COUNTS:
        folder = tmp_path_factory.mktemp(f"costs-{count}")
        url = str(folder / "run") if request.param == "local" else f"memory://costs-{folder.name}"
        build(url, folder / "run", count)
        with pytest.MonkeyPatch.context() as patch:
            found[count] = ask(url, count, folder / "out", patch)
        forget(url)
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_it_does_not_depend_on_the_others(costs, verb):
    """With 20, 100 or 400 checkpoints it is the same, within a fifth."""
    totals = {count: asked[verb].total() for count, asked in costs.items()}
    assert max(totals.values()) <= MOST * min(totals.values()), {c: dict(a[verb]) for c, a in costs.items()}


def test_all_is_asked(costs):
    """Each verb is counted, and no verb is free."""
    assert all(set(asked) == set(VERBS) and all(one.total() for one in asked.values()) for asked in costs.values())
