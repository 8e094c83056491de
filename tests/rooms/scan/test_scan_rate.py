"""The rate limit: as many bytes a second as asked for, no bursts, and nobody has to wait for it to end."""

import os
import random
import subprocess
import sys
import threading

import pytest
from support.format_files import safetensors_bytes

from ckptguard.errors import WorkerError
from ckptguard.scan import ScanOptions, paced_reader, scan_files
from ckptguard.scan.paced_reader import CATCH_UP, Rate
from ckptguard.scan.process.process_scanner import ProcessScanner
from ckptguard.scan.process.worker_process import WorkerLimits, WorkerProcess
from ckptguard.storage import open_storage

KEYS = ["a.safetensors", "b.safetensors"]
SLOWEST = 65536.0


class Clock:
    """Time that passes only when somebody sleeps; it stands for the module `time`."""

    def __init__(self):
        self.now = 100.0
        self.lock = threading.Lock()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        with self.lock:
            self.now += seconds


@pytest.fixture
def folder(tmp_path):
    """Two files, one of them large enough to be read in parts."""
    import torch

    (tmp_path / KEYS[0]).write_bytes(safetensors_bytes({"w": torch.ones(5 << 20), "v": torch.ones(77)}))
    (tmp_path / KEYS[1]).write_bytes(safetensors_bytes({"w": torch.ones(1 << 20)}))
    return tmp_path


def size_of(folder):
    """All bytes in it."""
    return sum((folder / key).stat().st_size for key in KEYS)


@pytest.mark.parametrize("seed", range(5))
def test_what_gets_through_is_what_was_asked_for(seed):
    """Whatever the blocks, however late the sleeper wakes and however long some reads take, within a tenth."""
    chance, clock = random.Random(seed), Clock()
    rate = Rate(100e6, clock.monotonic)
    begin, done, longest = clock.now, 0, 0.0
    for number in range(2000):
        read = chance.uniform(0, 0.004)
        if number % 500 == 499:
            read = longest = 0.2  # the disk hung for a while
        clock.sleep(read)
        length = chance.randrange(1, 1 << 20)
        done += length
        wait = rate.take(length)
        clock.sleep(wait + (chance.uniform(0, 0.003) if wait else 0.0))
    assert longest < CATCH_UP
    assert done / (clock.now - begin) == pytest.approx(100e6, rel=0.1)


def test_time_without_reading_is_not_saved_up():
    """After an hour of rest there is no more than a moment's burst."""
    clock = Clock()
    rate = Rate(1000.0, clock.monotonic)
    assert rate.take(1000) == pytest.approx(1.0)
    clock.sleep(3600.0)
    assert rate.take(1000) == pytest.approx(1.0 - CATCH_UP)
    assert rate.take(1000) == pytest.approx(2.0 - CATCH_UP)


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 3}, {"workers": 3, "md5": False}])
def test_a_scan_reads_at_the_rate_and_finds_the_same(monkeypatch, folder, options):
    """In one thread, in several, and in parts of a file."""
    clock = Clock()
    monkeypatch.setattr(paced_reader, "time", clock)
    slow = scan_files(open_storage(folder), KEYS, ScanOptions(rate=1e6, **options))
    assert clock.now - 100.0 == pytest.approx(size_of(folder) / 1e6, rel=0.1)
    clock.now = 100.0
    fast = scan_files(open_storage(folder), KEYS, ScanOptions(**options))
    assert clock.now == 100.0
    assert slow.files == fast.files


def test_who_waits_for_its_turn_hears_that_it_is_not_wanted(folder):
    """A scan that would take minutes is given up by whoever follows it, between two blocks."""

    class Enough(Exception):
        pass

    def report(done):
        if done == 0:
            raise Enough

    with pytest.raises(Enough):
        scan_files(open_storage(folder), KEYS, ScanOptions(rate=SLOWEST), report)


def scanning(**options):
    """A scanning process for a few files."""
    return ProcessScanner(WorkerLimits(memory=2**32, seconds=60.0), **options)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_slow_scan_is_stopped_at_once(folder, is_local):
    """In a process of its own, and in ours where the storage is elsewhere."""
    stop, begun = threading.Event(), threading.Event()

    def rate():
        if begun.is_set():
            stop.set()  # the second look at the rate comes from within the scan
        begun.set()
        return SLOWEST

    with scanning(stop=stop, rate=rate) as scanner, pytest.raises(WorkerError, match="stopped"):
        scanner(open_storage(folder) if is_local else Elsewhere(folder), KEYS)


def test_a_scan_goes_on_without_limit_when_there_is_none_any_more(folder):
    """Training has ended: what was being read slowly is read again at once."""
    asked = []

    def rate():
        asked.append(1)
        return SLOWEST if len(asked) < 4 else None

    with scanning(rate=rate) as scanner:
        found = scanner(open_storage(folder), KEYS)
        assert scanner(Elsewhere(folder), KEYS).files == found.files
    assert found.files == scan_files(open_storage(folder), KEYS).files


def test_a_process_gets_the_time_that_the_rate_takes(monkeypatch, folder):
    """A limit is no reason not to be able to tell; structures are read without it."""
    asked = []

    def scan(self, request, seconds, stopped):
        asked.append((seconds, request.options.rate))
        return scan_files(open_storage(request.url), request.keys)

    monkeypatch.setattr(WorkerProcess, "scan", scan)
    with scanning(rate=lambda: 1e6) as scanner:
        scanner(open_storage(folder), KEYS)
        assert asked == [(60.0 + size_of(folder) / 1e6, 1e6)]
        scanner(open_storage(folder), KEYS, ScanOptions(structure_only=True))
    assert asked[1:] == [(60.0, None)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scheduling classes of Linux")
def test_the_process_has_low_priority(folder):
    """Training comes first."""
    with scanning() as scanner:
        scanner(open_storage(folder), KEYS[1:])
        [pid] = scanner.pids
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == max(ours, 10)
        assert os.sched_getscheduler(pid) == os.SCHED_BATCH


OF_ITS_OWN = """
import os, sys
from ckptguard.scan.process.process_scanner import ProcessScanner
from ckptguard.scan.process.worker_process import WorkerLimits
from ckptguard.storage import open_storage

with ProcessScanner(WorkerLimits(memory=2**32, seconds=60.0)) as scanner:
    scanner(open_storage(sys.argv[1]), ["b.safetensors"])
    [pid] = scanner.pids
    print(os.getsid(pid) == pid, os.getsid(pid) == os.getsid(0), os.getpgid(pid) == os.getpgid(0))
    for one in ("self", pid):
        print(open(f"/proc/{one}/autogroup").read().rpartition(" ")[2].strip())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/autogroup"), reason="this system has no autogroups")
@pytest.mark.parametrize("apart", [True, False])
def test_a_session_apart_from_training_yields_as_a_whole(folder, apart):
    """The system shares processors between sessions first. The scanning process of a session's leader gets its own,
    with low priority. That of any other process stays in the session that it shares with training. A session that is
    older than every group, as in some containers, has an empty file: that is no priority to compare."""
    command = [sys.executable, "-c", OF_ITS_OWN, str(folder)]
    done = subprocess.run(command, start_new_session=apart, capture_output=True, text=True, check=True)
    where, ours, its = done.stdout.splitlines()
    assert where == ("True False False" if apart else "False True False")
    assert int(its) - int(ours) == 10 if apart else its == ours


class Elsewhere:
    """A storage that is not local."""

    root = None

    def __init__(self, folder):
        self._storage = open_storage(folder)

    def __getattr__(self, name):
        return getattr(self._storage, name)
