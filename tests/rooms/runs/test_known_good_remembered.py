"""Names of records that are remembered: used again while nothing changed, and never the reason of an old answer."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
from benchmarks.bench_known_good import counted
from support.still_clocks import Clock, CoarseTimes
from support.tiny_run import TINY, delete, inline, name_of, rot, save
from support.views import look

from ckptguard.errors import NoKnownGoodError
from ckptguard.keep.copies import release
from ckptguard.records import remembered_listing
from ckptguard.records.ledger import append_verdict
from ckptguard.records.names_by_step import list_steps
from ckptguard.records.remembered_listing import RememberedListing
from ckptguard.records.run import open_run
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.work import Work
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome
from ckptguard.verify.checkpoint import verify_checkpoint

SERIES = "model-#"
NEWEST = CheckpointId(SERIES, 500, 1)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def memory(clock, monkeypatch):
    """On whatever file system the tests run, its folders' times are trusted."""
    monkeypatch.setattr("ckptguard.storage.local.local_storage.folder_times_tell", lambda path: True)
    return RememberedListing(clock.monotonic, clock.wall)


@pytest.fixture
def asked(memory, url):
    """Asks by what is remembered: the id, or None. It is what is said without."""

    def ask(**arguments):
        run = open_run(url)
        try:
            fresh = find_known_good(run, **arguments)
        except NoKnownGoodError:
            with pytest.raises(NoKnownGoodError):
                find_known_good(run, listed=memory.steps(run), **arguments)
            return None
        assert find_known_good(run, listed=memory.steps(run), **arguments) == fresh
        return str(fresh.id)

    return ask


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """A run of five good checkpoints, with kept copies of the last."""
    place = str(tmp_path_factory.mktemp("five") / "run")
    for step in (100, 200, 300, 400, 500):
        save(place, step, step)
    reconcile(look(open_run(place), TINY), PassNotes(), work=Work(scanner=inline))
    return place


@pytest.fixture
def url(five, tmp_path):
    """That run, for this test."""
    return shutil.copytree(five, str(tmp_path / "run"))


def listings(memory, url):
    """How often all names are listed for one question."""
    with counted() as counts:
        memory.steps(open_run(url))
    return counts["names"]


def warm(memory, clock, url):
    """Have the names remembered."""
    listings(memory, url)
    clock.passed += 4
    assert listings(memory, url) == 1
    assert listings(memory, url) == 0


def test_listed_once_after_three_quiet_seconds(memory, clock, url):
    """Before that the folders' times may hide a change. From then on no names are listed, whoever asks."""
    assert [listings(memory, url) for _ in range(3)] == [1, 1, 1]
    clock.passed += 2.9
    assert listings(memory, url) == 1
    clock.passed += 0.2
    assert [listings(memory, url) for _ in range(3)] == [1, 0, 0]
    clock.passed += 1e6
    assert listings(memory, url) == 0


def test_prepared_for_the_first_question(memory, clock, url):
    """Whoever prepares lists nothing in vain."""
    with counted() as counts:
        memory.prepare(open_run(url))
        assert counts["names"] == 0
        clock.passed += 4
        memory.prepare(open_run(url))
        memory.prepare(open_run(url))
        assert counts["names"] == 1
    assert listings(memory, url) == 0


def good(url):
    save(url, 600, 600)
    reconcile(look(open_run(url), TINY), PassNotes(), work=Work(scanner=inline))


def saved_again(url):
    save(url, 500, 7)
    reconcile(look(open_run(url), TINY), PassNotes(), work=Work(scanner=inline))


def bad(url):
    run = open_run(url)
    release(run, NEWEST)
    rot(url, f"{name_of(500)}/model.safetensors")
    view = look(run, TINY.changed(keep="none"))
    verify_checkpoint(view, view.checkpoint(name_of(500)), work=Work(scanner=inline))


def suspect(url):
    run = open_run(url)
    verdict = look(run).history.verdict(NEWEST)
    append_verdict(run, msgspec.structs.replace(verdict, outcome=Outcome.SUSPECT))


def quarantined(url):
    back = GoBack(reason="loss", before_step=500, check_writing=False)
    roll_back(look(url, TINY), back, work=Work(scanner=inline))


def only_kept(url):
    delete(url, 500)


def kept_copy_gone(url):
    delete(url, 500)
    release(open_run(url), NEWEST)


def files_gone(url):
    for step in (500, 400, 300):
        shutil.rmtree(Path(url, name_of(step)))
        shutil.rmtree(Path(url, "_ckptguard", "kept"), ignore_errors=True)


def pruned(url):
    kept_copy_gone(url)
    assert len(prune(look(url), Policy(keep_last=1, keep_good=1), grace=0).removed) == 3


def manifest_gone(url):
    Path(url, "_ckptguard", "manifests", SERIES, f"{500:012d}.1.json").unlink()


def records_gone(url):
    shutil.rmtree(Path(url, "_ckptguard"))


def records_made_again(url):
    shutil.rmtree(Path(url, "_ckptguard"))
    delete(url, 500)
    reconcile(look(open_run(url), TINY), PassNotes(), work=Work(scanner=inline))


def records_put_back(url):
    """As from a backup of an hour ago, with its times."""
    own, other = Path(url, "_ckptguard"), Path(url, "backup")
    shutil.copytree(own, other)
    for path in (other / "ledger" / SERIES).glob(f"{500:012d}*"):
        path.unlink()
    for folder in (path for path in own.rglob("*") if path.is_dir()):
        shutil.copystat(folder, other / folder.relative_to(own))
    shutil.rmtree(own)
    other.rename(own)


def verdict_taken_out(url):
    """And the folder's time put back."""
    folder = Path(url, "_ckptguard", "ledger", SERIES)
    times = folder.stat()
    for path in folder.glob(f"{500:012d}*"):
        path.unlink()
    shutil.os.utime(folder, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("waited", [0.0, 10.0], ids=["at once", "later"])
@pytest.mark.parametrize(
    ("change", "becomes"),
    [
        (good, "600.1"),
        (saved_again, "500.2"),
        (bad, "400.1"),
        (suspect, "400.1"),
        (quarantined, "400.1"),
        (only_kept, "500.1"),
        (kept_copy_gone, "400.1"),
        (files_gone, "200.1"),
        (pruned, "400.1"),
        (manifest_gone, "400.1"),
        (records_gone, None),
        (records_made_again, "400.1"),
        (records_put_back, "400.1"),
        (verdict_taken_out, "400.1"),
    ],
)
def test_a_change_changes_the_answer_at_once(memory, clock, url, asked, change, becomes, waited):
    """Whatever changes in records or files, the next answer is that of somebody who remembers nothing."""
    warm(memory, clock, url)
    assert asked() == "500.1"
    change(url)
    clock.passed += waited
    assert asked() == becomes
    asked(before_step=400)
    clock.passed += 4
    assert [asked(), asked()] == [becomes, becomes]


def test_boundary_and_series(memory, clock, url, asked):
    """One listing serves every boundary and every series."""
    warm(memory, clock, url)
    for before, known in ((None, "500.1"), (500, "400.1"), (101, "100.1"), (100, None), (10**12, "500.1")):
        assert asked(before_step=before) == asked(before_step=before, series=SERIES) == known
        assert asked(before_step=before, series="other-#") is None
    assert listings(memory, url) == 0


def test_a_new_series(memory, clock, url, asked):
    """The folders of a new series are noticed where there was none before."""
    warm(memory, clock, url)
    for top in ("ledger", "manifests"):
        for path in Path(url, "_ckptguard", top, SERIES).iterdir():
            step = int(path.name.partition(".")[0])
            other = Path(url, "_ckptguard", top, "other-#", path.name.replace(f"{step:012d}", f"{step + 1000:012d}"))
            other.parent.mkdir(exist_ok=True)
            other.write_bytes(path.read_bytes())
    assert listings(memory, url) == 1
    assert asked() == "500.1"  # those records do not speak of themselves


@pytest.mark.parametrize("seed", range(10))
def test_however_coarse_a_folders_time_is(memory, clock, tmp_path, monkeypatch, seed):
    """Any changes, questions and pauses, and clocks that are put back."""
    chance, times = random.Random(seed), CoarseTimes(clock, monkeypatch)
    root = tmp_path / "run"
    ledger = root / "_ckptguard" / "ledger" / SERIES
    ledger.mkdir(parents=True)
    remembered = 0
    for number in range(300):
        for _ in range(chance.choice((0, 0, 0, 1, 1, 2))):
            (ledger / f"{chance.randrange(100):012d}.1.{number:04d}.good.json").touch()
            chance.choice(sorted(ledger.iterdir())).unlink()
            times.changed()
            clock.passed += chance.choice((0, 0, 0.1, 1))
        run = open_run(str(root))
        with counted() as counts:
            steps = memory.steps(run)
        remembered += counts["names"] == 0
        assert list(steps.below()) == list(list_steps(run).below())
        clock.passed += chance.choice((0, 0, 0.1, 0.5, 1, 1.5, 2, 2.5, 3, 4))
        if not chance.randrange(40):
            clock.put_forward += chance.choice((-30, -3, -1, -0.4, 1, 3600))
    assert remembered > 5


def test_a_clock_that_is_put_back(memory, clock, url, asked, monkeypatch):
    """It can be the time again that stood there when the names were listed."""
    times = CoarseTimes(clock, monkeypatch)
    times.changed()
    warm(memory, clock, url)
    clock.put_forward -= clock.passed
    suspect(url)
    times.changed()
    assert asked() == "400.1"


def test_a_time_to_come_tells_nothing(memory, clock, url):
    """The clock was ahead when the records changed: it will be that time again."""
    clock.put_forward = -3600.0
    listings(memory, url)
    clock.passed += 10
    assert [listings(memory, url) for _ in range(2)] == [1, 1]
    clock.passed += 3600
    warm(memory, clock, url)


@pytest.mark.parametrize("another", [False, True])
def test_names_that_change_while_they_are_listed(memory, clock, url, asked, monkeypatch, another):
    """Such a listing answers one question, and no second one: also if another thread has seen the change before."""
    listings(memory, url)
    clock.passed += 4

    def list_and_change(run):
        listed = list_steps(run)
        suspect(url)
        patch.undo()
        if another:
            memory.steps(run)
        return listed

    with monkeypatch.context() as patch:
        patch.setattr(remembered_listing, "list_steps", list_and_change)
        memory.steps(open_run(url))
    assert asked() == "400.1"
    clock.passed += 4
    assert asked() == "400.1"


def test_a_file_system_that_cannot_be_trusted(memory, clock, url, monkeypatch):
    """All is listed each time."""
    monkeypatch.setattr("ckptguard.storage.local.local_storage.folder_times_tell", lambda path: False)
    for _ in range(3):
        assert listings(memory, url) == 1
        clock.passed += 100


def test_another_file_system_in_the_records(memory, clock, url, monkeypatch):
    """Something mounted over a folder of the records is not of their file system, and nobody knows of which."""
    real = LocalStorage.list

    def mounted(self, prefix="", **more):
        return [
            msgspec.structs.replace(e, ctime_ns=None) if e.key == f"kept/{SERIES}" else e
            for e in real(self, prefix, **more)
        ]

    monkeypatch.setattr(LocalStorage, "list", mounted)
    for _ in range(3):
        assert listings(memory, url) == 1
        clock.passed += 4


def test_a_run_behind_a_url(clock):
    """Nothing is remembered, and nothing else is asked to find that out."""
    url = "memory://remembered"
    save(url, 100, 100)
    reconcile(look(open_run(url), TINY), PassNotes(), work=Work(scanner=inline))
    run, memory = open_run(url), RememberedListing(clock.monotonic, clock.wall)
    for _ in range(2):
        assert str(find_known_good(run, listed=memory.steps(run)).id) == "100.1"
        clock.passed += 4
    save(url, 200, 200)
    reconcile(look(open_run(url), TINY), PassNotes(), work=Work(scanner=inline))
    assert str(find_known_good(run, listed=memory.steps(run)).id) == "200.1"


def test_too_many_names(memory, clock, url, monkeypatch):
    """Memory is bounded: above it the names are listed each time."""
    monkeypatch.setattr(remembered_listing, "_MOST_NAMES", 5)
    for _ in range(3):
        assert listings(memory, url) == 1
        clock.passed += 4


def test_threads(memory, clock, url):
    """While one thread adds verdicts, no other hears an older answer than the one that was there when it asked."""
    run = open_run(url)
    ledger = Path(url, "_ckptguard", "ledger", SERIES)
    written, wrong, done = [500], [], threading.Event()

    def ask():
        while not done.is_set():
            least = written[-1]
            found = next(memory.steps(run).below())
            newest = max(int(name.partition(".")[0]) for name in found.names[SERIES])
            if newest < least:
                wrong.append((least, newest))

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for step in range(600, 800):
        (ledger / f"{step:012d}.1.0001.good.json").write_bytes(b"")
        written.append(step)
        clock.passed += step % 3 * 2
    done.set()
    for asker in askers:
        asker.join()
    assert wrong == []
