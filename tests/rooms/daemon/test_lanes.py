"""Lanes: no run waits for what another one does, none starves, and none has two lanes. Events are counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ckptguard_daemon import lanes as lanes_module
from ckptguard_daemon.lanes import Lanes, Turn
from support.daemon_process import PATIENCE, DaemonProcess, Starter, save, until
from support.hook_commands import toml

from ckptguard.decisions.turns import LANES, LARGE


@contextmanager
def lanes_for(work: Callable[[Any, Turn], float | None], **arguments: Any) -> Iterator[Lanes]:
    """Lanes at work, which end in the end."""
    stop = threading.Event()
    lanes = Lanes("test", work, stop, **arguments)
    thread = threading.Thread(target=lanes.run)
    thread.start()
    try:
        yield lanes
    finally:
        stop.set()
        lanes.wake(())
        thread.join(timeout=PATIENCE)
        assert lanes.wait_for_end(PATIENCE)
        assert not thread.is_alive()


class Gate:
    """Work that waits until it is let through, and says when it waits."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Semaphore(0), threading.Event()

    def wait_for(self, count: int) -> None:
        """Return when this number of turns wait."""
        for _ in range(count):
            assert self.entered.acquire(timeout=PATIENCE)

    def __call__(self) -> None:
        self.entered.release()
        assert self.opened.wait(PATIENCE)


def test_more_slow_ones_than_lanes_hold_up_nobody() -> None:
    """Three times as many as there are lanes at first hang in their storage. Another one still has its turn."""
    gate, quick = Gate(), threading.Event()

    def work(key: str, turn: Turn) -> None:
        gate() if key.startswith("slow") else quick.set()

    with lanes_for(work) as lanes:
        lanes.wake(f"slow {n}" for n in range(3 * LANES))
        gate.wait_for(3 * LANES)
        lanes.wake(["quick"])
        assert quick.wait(PATIENCE)
        gate.opened.set()


def test_a_backlog_makes_way() -> None:
    """Many runs have work without end. What comes later has its turn after each of them has had one more, besides the
    one that it had just then."""
    busy, turns, before, at_its_turn = 20, Counter[str](), Counter[str](), Counter[str]()
    came, all_had_some = threading.Event(), threading.Event()

    def work(key: str, turn: Turn) -> float | None:
        if key == "late":
            at_its_turn.update(turns)
            came.set()
            return None
        begun = 0
        while begun < 1000 and turn.may_begin(LARGE):
            begun += 1
        turns[key] += 1
        if len(turns) == busy:
            all_had_some.set()
        return None if came.is_set() else 0.0

    with lanes_for(work) as lanes:
        lanes.wake(f"busy {n}" for n in range(busy))
        assert all_had_some.wait(PATIENCE)
        lanes.wake(["late"])
        before.update(turns)
        assert came.wait(PATIENCE)
    assert max((at_its_turn - before).values(), default=0) <= 2


def test_few_read_large_checkpoints_at_a_time() -> None:
    """One more than may read large ones waits for one of them; a small one does not."""
    gate, small, refused = Gate(), threading.Event(), threading.Event()
    reading, most = Counter[str](), 0
    lock = threading.Lock()

    def work(key: str, turn: Turn) -> float | None:
        nonlocal most
        if not turn.may_begin(1 if key == "small" else LARGE + 1):
            refused.set()
            return 0.0
        if key == "small":
            small.set()
            return None
        with lock:
            reading[key] += 1
            most = max(most, sum(reading.values()))
        gate()
        with lock:
            reading[key] -= 1
        return None

    with lanes_for(work) as lanes:
        lanes.wake(f"large {n}" for n in range(LANES))
        gate.wait_for(LANES)
        lanes.wake(["one more"])
        assert refused.wait(PATIENCE)
        lanes.wake(["small"])
        assert small.wait(PATIENCE)
        assert set(reading) == {f"large {n}" for n in range(LANES)}
        gate.opened.set()
        gate.wait_for(1)
    assert most == LANES


def test_a_storage_that_hangs_leaves_large_turns_to_others() -> None:
    """However many large reads of one storage never end, a large one of another storage begins."""
    gate, elsewhere = Gate(), threading.Event()

    def work(key: str, turn: Turn) -> float | None:
        if not turn.may_begin(LARGE + 1):
            return 0.0
        if key == "elsewhere":
            elsewhere.set()
            return None
        gate()
        return None

    with lanes_for(work, storage_of=lambda key: "" if key == "elsewhere" else "nfs") as lanes:
        lanes.wake(f"large {n}" for n in range(2 * LANES))
        gate.wait_for(LANES)
        lanes.wake(["elsewhere"])
        assert elsewhere.wait(PATIENCE)
        gate.opened.set()


def test_one_lane_each_and_no_hint_is_lost() -> None:
    """Many threads wake many keys at once. No key has two turns at a time, and a turn begins after its last hint."""
    hints, seen, at_work, twice = Counter[int](), dict[int, int](), set[int](), list[int]()

    def work(key: int, turn: Turn) -> None:
        if key in at_work:
            twice.append(key)
        at_work.add(key)
        seen[key] = hints[key]
        at_work.discard(key)

    def hint(own: range) -> None:
        for _ in range(50):
            for key in own:
                hints[key] += 1
                lanes.wake([key])

    with lanes_for(work) as lanes:
        threads = [threading.Thread(target=hint, args=(range(n, 40, 4),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: all(not lanes.expects(key) for key in range(40)), "the last turns")
    assert seen == dict.fromkeys(range(40), 50)
    assert twice == []


def test_lanes_end_when_idle_and_outlive_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that raises is logged; its lane goes on. Lanes without work end, each with a word, and new ones begin."""
    monkeypatch.setattr(lanes_module, "_IDLE", 0.01)
    monkeypatch.setattr(lanes_module, "log", lambda event, **fields: lines.append(event))
    lines: list[str] = []
    begun, ended, done = threading.Semaphore(0), threading.Semaphore(0), threading.Semaphore(0)

    def work(key: str, turn: Turn) -> None:
        done.release()
        if key == "wrong":
            raise ValueError(key)

    with lanes_for(work, begin_lane=begun.release, end_lane=ended.release) as lanes:
        for key in ("wrong", "right"):
            lanes.wake([key])
            assert begun.acquire(timeout=PATIENCE)
            assert done.acquire(timeout=PATIENCE)
            assert ended.acquire(timeout=PATIENCE)
    assert lines == ["lane_failed"]


def large_save(run: Path) -> None:
    """A checkpoint that takes minutes at the least rate."""
    run.mkdir()
    header = b'{"w":{"dtype":"U8","shape":[8388608],"data_offsets":[0,8388608]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(8 << 20)
    (run / ".tmp").write_bytes(content)
    (run / ".tmp").rename(run / "net-1.safetensors")


def events(daemon: DaemonProcess, event: str, run: Path) -> list[dict[str, Any]]:
    """The log lines of one event about one run."""
    return [line for line in daemon.log_lines() if line["event"] == event and line.get("run") == str(run)]


def test_slow_runs_hold_up_no_verdict_and_no_replica(start: Starter, tmp_path: Path) -> None:
    """More runs than there are lanes at first are read at a rate that takes minutes. A small run has its verdict and
    its replica before any of them. Then the daemon stops at once."""
    slow, quick = [tmp_path / f"slow-{n}" for n in range(LANES + 2)], tmp_path / "quick"
    for run in slow:
        large_save(run)
    quick.mkdir()
    settings = toml(tmp_path, verify_rate=65536.0, replicas=[str(tmp_path / "elsewhere" / "{run}")])
    daemon = start(*slow, quick, arguments=settings)
    for run in slow:
        until(lambda run=run: events(daemon, "guarding", run), "the pass over a slow run")
    save(quick, 7)
    until(lambda: events(daemon, "replicated", quick), "the replica of the quick run")
    assert (tmp_path / "elsewhere" / "quick" / "net-7.safetensors").exists()
    assert not any(events(daemon, "verified", run) for run in slow)
    assert daemon.stop() == 0
    assert daemon.logged("stopped")
