"""The faults that campaigns are built on do what they say."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from support.faulty_storage import FakeClock, Fault, Faults, FaultyStorage, LateListing, injected

from ckptguard.errors import CouldNotTellError, DeniedError, StorageFullError, TransientError
from ckptguard.storage import Storage, open_storage


@pytest.fixture
def storage() -> Storage:
    """An empty store."""
    return open_storage(f"memory://faults-{secrets.token_hex(8)}", must_exist=False)


@pytest.mark.parametrize("fault", [f for f in Fault if isinstance(f.value, Exception)], ids=lambda f: f.name)
def test_the_nth_operation_fails_once(storage: Storage, fault: Fault) -> None:
    """The operations before and after it pass."""
    faults = Faults(fault, nth=2)
    faulty = FaultyStorage(storage, faults)
    faulty.create("a", b"1")
    with pytest.raises(CouldNotTellError) as caught:
        faulty.create("b", b"2")
    faulty.create("c", b"3")
    assert [e.key for e in storage.list()] == ["a", "c"]
    assert faults.struck == [("create", "b")]
    assert isinstance(caught.value, TransientError) is fault.passes
    assert isinstance(caught.value, StorageFullError) is (fault is Fault.ENOSPC)
    assert isinstance(caught.value, DeniedError) is (fault is Fault.EACCES)


def test_for_ever(storage: Storage) -> None:
    """From the nth operation on, all fail."""
    faulty = FaultyStorage(storage, Faults(Fault.EIO, nth=2, forever=True))
    faulty.create("a", b"1")
    for _ in range(3):
        with pytest.raises(CouldNotTellError):
            faulty.stat("a")


def test_spoilt_bytes(storage: Storage) -> None:
    """Wrong bytes have the right length, in reading and in writing; a cut answer is no data."""
    storage.create("k", b"12345678")
    with FaultyStorage(storage, Faults(Fault.WRONG_BYTES, nth=1)).open("k") as reader:
        assert (len(reader.read(0, 8)), reader.read(0, 8)) == (8, b"12345678")
    with FaultyStorage(storage, Faults(Fault.TRUNCATED, nth=1)).open("k") as reader, pytest.raises(TransientError):
        reader.read(0, 8)
    for fault, size in ((Fault.WRONG_BYTES, 8), (Fault.TRUNCATED, 4)):
        faulty = FaultyStorage(storage, Faults(fault, nth=1, forever=True))
        faulty.create(f"created-{size}", b"12345678")
        faulty.copy("k", f"copied-{size}")
        with faulty.upload(f"uploaded-{size}") as upload:
            upload.write(b"12345678")
            upload.commit()
        for how in ("created", "copied", "uploaded"):
            with storage.open(f"{how}-{size}") as reader:
                assert reader.entry.size == size
                assert reader.read(0, size) != b"12345678"[:size] or size == 4


def test_a_lost_answer_happened(storage: Storage) -> None:
    """The operation is done, and fails."""
    with pytest.raises(TransientError):
        FaultyStorage(storage, Faults(Fault.LOST_ANSWER, nth=1)).create("k", b"1")
    assert storage.stat("k").size == 1


def test_injected_faults_lie_below_the_retries(storage: Storage, tmp_path: Path) -> None:
    """What passes is met by another try; the rest comes out, of local folders too."""
    storage.create("k", b"1")
    passing, lasting, local = Faults(Fault.TIMEOUT, nth=1), Faults(Fault.EIO, nth=1), Faults(Fault.ENOSPC, nth=1)
    with injected(passing):
        assert open_storage(storage.url, must_exist=False).stat("k").size == 1
    with injected(lasting), pytest.raises(CouldNotTellError):
        open_storage(storage.url)
    with injected(local), pytest.raises(StorageFullError):
        open_storage(tmp_path).create("k", b"1")
    assert passing.reached
    assert lasting.reached
    assert local.reached


def test_late_listings(storage: Storage) -> None:
    """New keys show and removed ones go when their time has come; reading is up to date."""
    clock = FakeClock()
    storage.create("old", b"1")
    late = LateListing(storage, clock, lambda key: 3.0)
    late.create("a/new", b"12")
    late.remove("old")
    assert late.stat("a/new").size == 2
    assert [e.key for e in late.list()] == ["old"]
    clock.advance(3.0)
    assert [(e.key, e.kind) for e in late.list()] == [("a", "folder")]
    assert [e.key for e in late.list("a")] == [e.key for e in late.list(recursive=True)] == ["a/new"]
