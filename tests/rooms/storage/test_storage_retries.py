"""What may pass is tried again, within bounds and by the clock; nothing else, and nothing once it is called off."""

from __future__ import annotations

import secrets
import threading

import pytest
from support.faulty_storage import FakeClock, Fault, Faults, FaultyStorage

from ckptguard.errors import (
    ChangedWhileReadError,
    DeniedError,
    ObjectExistsError,
    ObjectMissingError,
    StoppedError,
    StorageError,
    StorageFullError,
    TransientError,
)
from ckptguard.storage import Storage, open_storage
from ckptguard.storage.remote.remote_storage import RemoteStorage
from ckptguard.storage.retries import Retries, RetryClock, RetryingStorage


@pytest.fixture
def store() -> Storage:
    """An empty store without faults or retries."""
    opened = open_storage(f"memory://retries-{secrets.token_hex(8)}", must_exist=False)
    assert isinstance(opened, RetryingStorage)
    return opened.inner


def retrying(store: Storage, faults: Faults, clock: FakeClock, **settings: float) -> RetryingStorage:
    """The store with faults below retries that wait on a fake clock."""
    return RetryingStorage(FaultyStorage(store, faults), clock.retries(**settings))


def failing(error: Exception, times: int, answer: str = "done"):
    """Something that fails so many times."""
    calls: list[int] = []

    def act() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return answer

    return act, calls


def test_waits_grow_and_end() -> None:
    """Each wait is twice the last one, up to the longest; after the last attempt the error says how often."""
    clock = FakeClock()
    act, calls = failing(TransientError("k: reset", key="k"), 99)
    with pytest.raises(TransientError, match=r"k: reset \(tried 6 times\)"):
        clock.retries(attempts=6, first=1.0, longest=5.0, total=100.0).run("k", act)
    assert (len(calls), clock.waits) == (6, [1.0, 2.0, 4.0, 5.0, 5.0])


def test_the_time_is_bounded() -> None:
    """No wait begins that would end too late."""
    clock = FakeClock()
    act, calls = failing(TransientError("k: reset", key="k"), 99)
    with pytest.raises(TransientError, match="tried 3 times"):
        clock.retries(attempts=99, first=1.0, longest=60.0, total=6.0).run("k", act)
    assert (len(calls), clock.waits) == (3, [1.0, 2.0])


def test_jitter_only_shortens() -> None:
    """Waits are between half and the whole of what they would be."""

    class Lots(FakeClock):
        lots = iter([0.0, 0.5, 1.0])

        def chance(self) -> float:
            return next(self.lots)

    clock = Lots()
    act, _ = failing(TransientError("k: reset", key="k"), 3)
    assert Retries(first=1.0, clock=clock).run("k", act) == "done"
    assert clock.waits == [1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    "error",
    [
        ObjectMissingError("k", key="k"),
        ObjectExistsError("k", key="k"),
        DeniedError("k", key="k"),
        StorageFullError("k", key="k"),
        StorageError("k", key="k"),
        ChangedWhileReadError("k", key="k"),
    ],
    ids=lambda error: error.kind,
)
def test_what_lasts_is_told_at_once(error: StorageError) -> None:
    """One attempt, no wait."""
    clock = FakeClock()
    act, calls = failing(error, 99)
    with pytest.raises(type(error)):
        clock.retries().run("k", act)
    assert (len(calls), clock.waits) == (1, [])


def test_called_off_before() -> None:
    """Nothing is begun."""
    retries = Retries()
    retries.stop.set()
    act, calls = failing(RuntimeError(), 0)
    with pytest.raises(StoppedError):
        retries.run("k", act)
    assert calls == []


def test_called_off_while_waiting(store: Storage) -> None:
    """The wait ends at once, and nothing is written any more."""
    stop, waiting = threading.Event(), threading.Event()

    class Waiting(RetryClock):
        def pause(self, seconds: float, stop: threading.Event) -> bool:
            assert seconds > 100
            waiting.set()
            return super().pause(seconds, stop)

    retries = Retries(first=1000.0, longest=1000.0, total=1e6, stop=stop, clock=Waiting())
    storage = RetryingStorage(FaultyStorage(store, Faults(Fault.TIMEOUT, nth=1)), retries)
    caught: list[Exception] = []

    def write() -> None:
        try:
            storage.create("k", b"1")
        except StoppedError as error:
            caught.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    assert waiting.wait(100)
    stop.set()
    writer.join(100)
    assert [type(error) for error in caught] == [StoppedError]
    with pytest.raises(ObjectMissingError):
        store.stat("k")


@pytest.mark.parametrize("size", [10, 20 << 20], ids=["small", "large"])
def test_an_upload_that_is_called_off_writes_nothing(store: Storage, size: int) -> None:
    """Neither its commit nor another part is begun."""
    retries = FakeClock().retries()
    with RetryingStorage(store, retries).upload("k") as upload:
        upload.write(bytes(size))
        retries.stop.set()
        for attempt in (lambda: upload.write(b"more"), upload.commit):
            with pytest.raises(StoppedError):
                attempt()
    with pytest.raises(ObjectMissingError):
        store.stat("k")


@pytest.mark.parametrize("fault", [Fault.TIMEOUT, Fault.UNAVAILABLE, Fault.RESET], ids=lambda fault: fault.name)
def test_every_operation_survives_what_passes(store: Storage, fault: Fault) -> None:
    """Whichever operation it strikes, the caller does not notice."""
    for nth in range(1, 40):
        clock, faults = FakeClock(), Faults(fault, nth, only=lambda operation, key: operation != "move")
        storage = retrying(store, faults, clock)
        folder = f"n{nth}"
        storage.create(f"{folder}/a", b"12345678")
        assert storage.stat(f"{folder}/a").size == 8
        assert [e.key for e in storage.list(folder)] == [f"{folder}/a"]
        with storage.open(f"{folder}/a") as reader:
            assert reader.read(2, 3) == b"345"
        assert storage.copy(f"{folder}/a", f"{folder}/b") == "copy"
        storage.remove(f"{folder}/a")
        assert [e.key for e in store.list(folder)] == [f"{folder}/b"]
        assert len(clock.waits) == faults.reached
        if not faults.reached:
            return
    raise AssertionError("the operation never passed untouched")


@pytest.mark.parametrize("operation", ["create", "copy", "remove"])
def test_a_lost_answer_counts_as_done(store: Storage, operation: str) -> None:
    """What had succeeded is recognised as ours by its content."""
    for key in ("other", "source"):
        store.create(key, b"12345678")
    storage = retrying(store, Faults(Fault.LOST_ANSWER, nth=1), FakeClock())
    if operation == "create":
        storage.create("target", b"nonce 1")
    elif operation == "copy":
        assert storage.copy("source", "target") == "copy"
    else:
        storage.remove("source")
    assert len(store.list()) == (1 if operation == "remove" else 3)


def test_anothers_object_is_not_ours(store: Storage) -> None:
    """After an unclear answer, other content under the key means that another won."""

    class Raced(FaultyStorage):
        def create(self, key: str, data: bytes) -> None:
            if not self.faults.reached:
                self.inner.create(key, b"nonce 2")
            super().create(key, data)

        def copy(self, source: str, target: str, *, how: str = "copy") -> str:
            if not self.faults.reached:
                self.inner.create(target, b"87654321")
            return super().copy(source, target, how=how)

    store.create("source", b"12345678")
    for act in (lambda s: s.create("created", b"nonce 1"), lambda s: s.copy("source", "copied")):
        storage = RetryingStorage(Raced(store, Faults(Fault.TIMEOUT, nth=1)), FakeClock().retries())
        with pytest.raises(ObjectExistsError):
            act(storage)
    with store.open("created") as reader:
        assert reader.read(0, 7) == b"nonce 2"


def test_a_clear_conflict_is_one(store: Storage) -> None:
    """Without an unclear answer before, nobody looks whose the bytes are."""
    store.create("k", b"same")
    with pytest.raises(ObjectExistsError):
        retrying(store, Faults(Fault.EIO, nth=0), FakeClock()).create("k", b"same")


@pytest.mark.parametrize("cut", [b"", b"1234", b"12345678+"], ids=["empty", "short", "long"])
def test_a_body_of_wrong_length_is_no_data(store: Storage, monkeypatch: pytest.MonkeyPatch, cut: bytes) -> None:
    """Once, it is read again; for ever, it is an error."""
    assert isinstance(store, RemoteStorage)
    store.create("k", b"12345678")
    real, answers = store._fs.cat_file, [cut]
    monkeypatch.setattr(store._fs, "cat_file", lambda *a, **k: answers.pop() if answers else real(*a, **k))
    clock = FakeClock()
    with RetryingStorage(store, clock.retries()).open("k") as reader:
        assert reader.read(0, 8) == b"12345678"
        assert len(clock.waits) == 1
    with RetryingStorage(store, clock.retries()).open("k") as reader:
        monkeypatch.setattr(store._fs, "cat_file", lambda *a, **k: cut)
        with pytest.raises(TransientError, match="asked for 8 bytes"):
            reader.read(0, 8)


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "lost-answer"])
def test_the_steps_of_a_move_are_tried_again(store: Storage, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """A copy that fails, or whose answer is lost, does not leave half a move."""
    assert isinstance(store, RemoteStorage)
    clock, failures = FakeClock(), [1, 1]
    monkeypatch.setattr(store, "_retries", clock.retries())
    for key in ("a/x", "a/y"):
        store.create(key, key.encode())
    real = store._fs.cp_file

    def copy(source: str, target: str) -> None:
        if lost or not failures:
            real(source, target)
        if failures:
            failures.pop()
            raise TimeoutError

    monkeypatch.setattr(store._fs, "cp_file", copy)
    store.move("a", "b")
    assert [e.key for e in store.list(recursive=True)] == ["b/x", "b/y"]
    assert len(clock.waits) == 2
