"""The scanning process: the same answer as inline, and "could not tell" whenever it fails."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.daemon_process import Starter, save, until, was_asked

from ckptguard.errors import ObjectMissingError, WorkerError
from ckptguard.formats.structure import Leaf
from ckptguard.scan import ScanOptions, scan_files
from ckptguard.scan.process import process_scanner as process_scanner_module
from ckptguard.scan.process import worker, worker_process
from ckptguard.scan.process.messages import PREFIX, Answer
from ckptguard.scan.process.process_scanner import ProcessScanner
from ckptguard.scan.process.worker_process import WorkerLimits, scrubbed
from ckptguard.scan.result import Scan
from ckptguard.storage import Storage, open_storage


@pytest.fixture
def storage(run: Path) -> Storage:
    """A run with one save."""
    save(run, 1)
    return open_storage(run)


@pytest.fixture
def stop() -> threading.Event:
    """Stops a scan."""
    return threading.Event()


def process_scanner(
    stop: threading.Event, *, memory: int = 4 * 2**30, seconds: float = 250.0, idle: float = 250.0
) -> ProcessScanner:
    """One scanning process."""
    return ProcessScanner(WorkerLimits(memory=memory, seconds=seconds, idle=idle), stop=stop)


def the_pid(scanner: ProcessScanner) -> int | None:
    """The scanning process, while there is one."""
    return next(iter(scanner.pids), None)


@pytest.fixture
def scanner(stop: threading.Event) -> Iterator[ProcessScanner]:
    """A scanner with the default settings."""
    made = process_scanner(stop)
    yield made
    made.close()


KEYS = ("net-1.safetensors",)


def in_background(scanner: ProcessScanner, storage: Storage) -> tuple[threading.Thread, list[BaseException]]:
    """A scan in a thread, and what it raised."""
    raised: list[BaseException] = []

    def scan() -> None:
        try:
            scanner(storage, KEYS)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=scan)
    thread.start()
    return thread, raised


def unread(scanner: ProcessScanner) -> int:
    """How many bytes of a request wait for the scanning process."""
    process = scanner._process._process
    assert process is not None
    assert process.stdin is not None
    return int.from_bytes(fcntl.ioctl(process.stdin.fileno(), termios.FIONREAD, b"\0" * 4), sys.byteorder)


def paused(scanner: ProcessScanner, storage: Storage, options: ScanOptions | None = None) -> int:
    """The scanning process, stopped, so that the next scan hangs."""
    scanner(storage, KEYS, options)
    pid = the_pid(scanner)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    until(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text(), "the pause")
    return pid


def test_errors_come_back_as_they_were(scanner: ProcessScanner, storage: Storage) -> None:
    """An error of the storage keeps its class and its key, and does not cost the process."""
    scanner(storage, KEYS)
    before = the_pid(scanner)
    with pytest.raises(ObjectMissingError) as caught:
        scanner(storage, ("gone.pt",))
    assert (caught.value.key, the_pid(scanner)) == ("gone.pt", before)


def test_it_holds_no_secrets(scanner: ProcessScanner, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and passwords of the daemon's environment are not in the scanning process."""
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "CKPTGUARD_WEBHOOK", "LC_TEST"):
        monkeypatch.setenv(name, "s3cr3t")
    scanner(storage, KEYS)
    seen = Path(f"/proc/{the_pid(scanner)}/environ").read_text()
    names = {line.partition("=")[0] for line in seen.split("\0") if line}
    assert [line for line in seen.split("\0") if "s3cr3t" in line] == ["LC_TEST=s3cr3t"]
    assert names <= set(scrubbed(os.environ))


def test_it_is_limited_and_yields(scanner: ProcessScanner, storage: Storage) -> None:
    """Memory, open files, core dumps and processor time are limited; its priority is low."""
    scanner(storage, KEYS)
    pid = the_pid(scanner)
    assert pid is not None
    assert resource.prlimit(pid, resource.RLIMIT_AS) == (4 * 2**30, 4 * 2**30)
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] <= 256
    assert resource.prlimit(pid, resource.RLIMIT_CPU)[0] != resource.RLIM_INFINITY
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    assert os.sched_getscheduler(pid) == os.SCHED_BATCH
    inherited = {os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir()}
    assert not any("socket" in target for target in inherited)


def policy_of(scanner: ProcessScanner) -> tuple[int | None, int]:
    """The scanning process, and how the system schedules it."""
    pid = the_pid(scanner)
    assert pid is not None
    return pid, os.sched_getscheduler(pid)


def test_only_a_long_scan_with_patience_yields(
    scanner: ProcessScanner, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets what all others leave of the processors. The process cannot go back, so another one does what is
    urgent."""
    patient = ScanOptions(yield_for=250.0)
    scanner(storage, KEYS, patient)
    first, policy = policy_of(scanner)
    assert policy == os.SCHED_BATCH
    monkeypatch.setattr(process_scanner_module, "LARGE", 0)
    found = scanner(storage, KEYS, patient)
    assert policy_of(scanner) == (first, os.SCHED_IDLE)
    assert os.getpriority(os.PRIO_PROCESS, first) == 19
    scanner(storage, KEYS, patient)
    assert policy_of(scanner) == (first, os.SCHED_IDLE)
    assert scanner(storage, KEYS).files == found.files
    second, policy = policy_of(scanner)
    assert second != first
    assert policy == os.SCHED_BATCH
    monkeypatch.setattr(scanner, "_may_yield", lambda: False)  # as without training
    scanner(storage, KEYS, patient)
    assert policy_of(scanner) == (second, os.SCHED_BATCH)


def test_a_late_scan_yields_no_longer(
    scanner: ProcessScanner, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that never gets a processor is replaced when its patience ends, and the scan is done all the same."""
    monkeypatch.setattr(process_scanner_module, "LARGE", 0)
    scanner(storage, KEYS, ScanOptions(yield_for=250.0))
    pid = paused(scanner, storage, ScanOptions(yield_for=250.0))
    assert scanner(storage, KEYS, ScanOptions(yield_for=0.3)).files[0].md5
    assert not Path(f"/proc/{pid}").exists()
    assert policy_of(scanner)[1] == os.SCHED_BATCH


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_process_could_not_tell(scanner: ProcessScanner, storage: Storage, number: signal.Signals) -> None:
    """Killed in the middle of a scan, it is WorkerError, which names the signal; the next scan has a new process."""
    pid = paused(scanner, storage)
    thread, raised = in_background(scanner, storage)
    until(lambda: unread(scanner), "the request")
    os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    thread.join()
    assert [type(e) for e in raised] == [WorkerError]
    assert number.name in str(raised[0])
    assert scanner(storage, KEYS).files[0].md5
    assert the_pid(scanner) != pid


def test_too_slow_is_ended(scanner: ProcessScanner, storage: Storage) -> None:
    """A scan past its time is WorkerError, and its process is gone."""
    pid = paused(scanner, storage)
    scanner._seconds = 0.1  # only now: to start the process and to scan may take their time
    with pytest.raises(WorkerError, match="longer than"):
        scanner(storage, KEYS)
    assert not Path(f"/proc/{pid}").exists()


def test_a_stop_ends_a_scan(scanner: ProcessScanner, storage: Storage, stop: threading.Event) -> None:
    """Setting the stop event ends a scan that would have gone on."""
    pid = paused(scanner, storage)
    thread, raised = in_background(scanner, storage)
    stop.set()
    thread.join()
    assert [type(e) for e in raised] == [WorkerError]
    assert not Path(f"/proc/{pid}").exists()


def test_the_least_memory_is_enough_to_start(storage: Storage, stop: threading.Event) -> None:
    """With the smallest limit that the settings allow, an ordinary checkpoint is scanned."""
    scanner = process_scanner(stop, memory=256 * 2**20)
    try:
        assert scanner(storage, KEYS).files[0].md5
    finally:
        scanner.close()


def test_an_idle_process_ends_and_is_replaced(storage: Storage, stop: threading.Event) -> None:
    """After its idle time the process is gone; the next scan starts another without a word."""
    scanner = process_scanner(stop, idle=0.2)
    try:
        scanner(storage, KEYS)
        until(lambda: the_pid(scanner) is None, "the end of the idle process")
        assert scanner(storage, KEYS).files[0].md5
    finally:
        scanner.close()


@pytest.mark.parametrize(
    "answer",
    [PREFIX.pack(2**62), PREFIX.pack(5) + b"\xc1\xc1\xc1\xc1\xc1", PREFIX.pack(1) + b"\x2a", b"\0" * 8],
    ids=["endless", "not MessagePack", "a number", "nothing"],
)
def test_nonsense_could_not_tell(
    scanner: ProcessScanner, storage: Storage, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """An answer that is too large or no answer at all is WorkerError."""
    code = f"import os, time; os.read(0, 9); os.write(1, {answer!r}); time.sleep(60)"
    real = worker_process.subprocess.Popen

    def impostor(command: list[str], **arguments: object) -> object:
        return real([command[0], "-c", code], **arguments)  # type: ignore[call-overload]

    monkeypatch.setattr(worker_process.subprocess, "Popen", impostor)
    with pytest.raises(WorkerError):
        scanner(storage, KEYS)
    assert the_pid(scanner) is None


def test_numbers_beyond_64_bits_do_not_stop_an_answer(storage: Storage) -> None:
    """A pickle's huge integer leaves the scan sendable; everything else in it arrives."""
    scan = scan_files(storage, KEYS)
    leaves = (Leaf("seed", 2**80), Leaf("step", 7), Leaf("scale", float("inf")))
    structure = msgspec.structs.replace(scan.files[0].structure, leaves=leaves)
    huge = Scan(files=(msgspec.structs.replace(scan.files[0], structure=structure),), seconds=0.0)
    sent = worker._frame_of(Answer(scan=huge))[PREFIX.size :]
    received = msgspec.msgpack.decode(sent, type=Answer).scan
    assert received is not None
    assert received.files[0].structure.leaves == (Leaf("step", 7), Leaf("scale", float("inf")))


def test_a_killed_worker_leaves_the_save_pending(run: Path, start: Starter) -> None:
    """In the daemon, a worker killed in its scan means pending and another try, never BAD."""
    save(run, 100)
    daemon = start(run)
    daemon.known_good(100)
    pid = daemon.child()
    os.kill(pid, signal.SIGSTOP)
    save(run, 200)
    until(lambda: was_asked(pid), "a question to the worker")
    os.kill(pid, signal.SIGKILL)
    assert daemon.known_good(200)["step"] == 200
    assert not any("bad" in p.name for p in (run / "_ckptguard" / "ledger").rglob("*.json"))
