"""Replicas on an object store, and replicators that are killed."""

import itertools
import shutil
import signal
import subprocess
import sys

import pytest
from servers.fixtures import S3_BUCKETS, served
from support.counting_storage import counted
from support.crashes import Killed, kill_at
from support.run_contents import files_of, verify_all
from support.runs import QUICK, write_sharded
from support.tiny_files import content
from support.views import look

from ckptguard.errors import CkptguardError
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.replicas import replicate as module
from ckptguard.replicas.replicate import replicate
from ckptguard.replicas.start_run import start_run
from ckptguard.runs.find_known_good import find_known_good, known_good_candidates
from ckptguard.runs.run_view import RunView
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

# Replicates, and kills itself when so many blocks have passed.
KILLED = """
import os, signal, sys
from ckptguard.replicas.replicate import replicate
from ckptguard.runs.run_view import open_view
from ckptguard.runs.work import Work
from ckptguard.values.settings import Settings
left = [int(sys.argv[3])]
def progress(length):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
view = open_view(sys.argv[1], Settings(storage=eval(sys.argv[4])))
assert replicate(view, sys.argv[2], work=Work(progress=progress)).trouble is None
"""


@pytest.fixture
def run(root, moto):
    """The run, opened with what opens the bucket too."""
    return open_run(str(root), served())


@pytest.fixture
def two(root, run):
    """A run of two sharded checkpoints that are good."""
    for step in (100, 200):
        write_sharded(root, step, seed=step)
    reconcile(look(run), PassNotes())
    return run


def test_a_replica_in_a_bucket(root, two, moto, tmp_path):
    """It verifies, restores, and gives a lost run back, all from the bucket."""
    url = f"s3://{S3_BUCKETS[0]}/replicas/{tmp_path.name}"
    before = files_of(two)
    done = replicate(look(two), url)
    assert (done.behind, str(done.last_good), done.trouble) == (0, "200.1", None)
    shutil.rmtree(root)
    replica = open_run(url, served())
    assert files_of(replica) == before
    assert set(verify_all(replica).values()) == {Outcome.GOOD}
    assert restore(look(replica), str(tmp_path / "out")).step == 200
    assert str(start_run(look(replica), str(root), QUICK).id) == "200.1"
    assert set(verify_all(open_run(str(root))).values()) == {Outcome.GOOD}


def test_files_of_one_part_and_of_several_are_read_back(root, run, moto, tmp_path):
    """A small file, one of one part exactly and one of several; also from a store without parts."""
    for name, length in (("a-1", 1 << 10), ("b-2", 8 << 20), ("c-3", (17 << 20) + 4)):
        header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (length - 128, length - 128)
        header = header.ljust(120)
        (root / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(length - 128))
    reconcile(look(run), PassNotes())
    for url in (f"s3://{S3_BUCKETS[0]}/sums/{tmp_path.name}", f"memory://sums/{tmp_path.name}"):
        done = replicate(look(run), url)
        assert [c.done for c in done.checkpoints] == ["sent"] * 3
        assert set(verify_all(open_run(done.url, served())).values()) == {Outcome.GOOD}


def test_killed_in_the_middle_and_run_again(two, moto, tmp_path):
    """kill -9 between two blocks: what the bucket calls good is whole at any time, and the next call sends only what
    had not arrived."""
    total = sum(len(content) for content in files_of(two).values())
    url = f"s3://{S3_BUCKETS[0]}/killed/{tmp_path.name}"
    options = repr({f"s3://{S3_BUCKETS[0]}": moto.options})
    script = [sys.executable, "-c", KILLED, two.url, url]
    files = len(files_of(two))
    for blocks in (files // 2, files):
        ended = subprocess.run([*script, str(blocks), options], check=False, capture_output=True, text=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        there = open_run(url, served(), must_exist=False)
        outcomes = verify_all(there)
        assert all(outcomes[c.manifest.path] is Outcome.GOOD for c in candidates(there))
    done = replicate(look(two), url)
    assert 0 < sum(c.sent for c in done.checkpoints) < total
    assert files_of(open_run(url, served())) == files_of(two)
    assert done.behind == 0


def candidates(run):
    """What a run calls known-good."""
    return known_good_candidates(look(run))


def test_a_beginning_that_is_killed_at_any_step_goes_on(root, two, tmp_path):
    """A run that is begun from a replica, killed before step 1, 2, ...: what it calls good is whole, and the same
    command again ends where an untouched one ends."""
    place = str(tmp_path / "replica")
    replicate(look(two), place)
    before = {k: v for k, v in files_of(two).items() if k.split("/")[0].endswith("200")}
    killed = 0
    for number in itertools.count(1):
        new = tmp_path / f"new-{number}"
        try:
            with kill_at(number):
                start_run(look(open_run(place)), str(new), QUICK)
            break
        except Killed:
            killed += 1
        lost = open_run(str(new), must_exist=False)
        try:
            assert str(find_known_good(lost).id) == "200.1"
            whole = files_of(lost)
        except CkptguardError:
            whole = None
        if whole is None:
            assert str(start_run(look(open_run(place)), str(new), QUICK).id) == "200.1"
            whole = files_of(lost)
        assert whole == before
        shutil.rmtree(new)
    assert killed > 5
    assert files_of(open_run(str(new))) == before


SETTINGS = Settings(settle=0.0, scan_interval=1.0, keep="none")


def good_run(root, count):
    """A run of so many good checkpoints."""
    for step in range(1, count + 1):
        folder = root / f"model-{step}"
        folder.mkdir(parents=True)
        for name, data in content(step).items():
            (folder / name).write_bytes(data)
    run = open_run(str(root))
    reconcile(RunView(run, SETTINGS), PassNotes(), assume_quiet=True)
    return run


@pytest.fixture
def there(monkeypatch):
    """What is asked of each replica that is opened."""
    asked = []

    def opened(*args, **kwargs):
        replica, requests = counted(open_run(*args, **kwargs))
        asked.append(requests)
        return replica

    monkeypatch.setattr(module, "open_run", opened)
    return asked


def cost_of_sending(tmp_path, count, there):
    """Requests here and there for each of so many checkpoints; each side's files are listed once at most."""
    run, here = counted(good_run(tmp_path / f"run-{count}", count))
    done = replicate(RunView(run, SETTINGS), str(tmp_path / f"replica-{count}"))
    assert [one.done for one in done.checkpoints] == ["sent"] * count
    assert (here["run.list"], there[-1]["run.list"]) == (0, 1)
    return (here.total() + there[-1].total()) / count


def test_a_checkpoint_costs_the_same_among_many(tmp_path, there):
    """Of 40 no more than of 10."""
    few, many = (cost_of_sending(tmp_path, count, there) for count in (10, 40))
    assert many <= few


def test_nothing_is_listed_again_for_what_is_there(tmp_path, there):
    """A second replication lists as often among 40 as among 10."""
    lists = []
    for count in (10, 40):
        run, here = counted(good_run(tmp_path / f"run-{count}", count))
        place = str(tmp_path / f"replica-{count}")
        replicate(RunView(run, SETTINGS), place)
        here.clear()
        replicate(RunView(run, SETTINGS), place)
        lists.append(
            [(asked["run.list"], asked["records.list"], asked["records.names"]) for asked in (here, there[-1])]
        )
    assert lists[0] == lists[1]


def test_starting_from_a_replica_lists_it_never(tmp_path):
    """What may be taken, its records say."""
    replicas = []
    for count in (10, 40):
        place = str(tmp_path / f"replica-{count}")
        replicate(look(good_run(tmp_path / f"run-{count}", count)), place)
        replica, requests = counted(open_run(place))
        start_run(look(replica), str(tmp_path / f"new-{count}"), SETTINGS)
        assert requests["run.list"] == 0
        replicas.append((requests["records.list"], requests["records.names"], requests["run.open"]))
    assert replicas[0] == replicas[1]
