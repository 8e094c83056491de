"""Reading a file front to back at a pace: every byte once, few of them held, and over when it is called off."""

from __future__ import annotations

import io
import os
import threading

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptguard.scan.paced_reader import Pace, read_through
from ckptguard.storage import open_storage
from ckptguard.storage.read_ahead import IN_FLIGHT
from ckptguard.storage.remote.multipart import S3Parts, _Body
from ckptguard.storage.remote.remote_storage import RemoteReader
from ckptguard.storage.remote.upload import RemoteUpload
from ckptguard.storage.retries import Retries

BLOCK = 1000
DATA = os.urandom(20 * BLOCK + 11)


@pytest.fixture(params=["memory", "local"])
def reader(request, tmp_path):
    """The data, opened, and whether it is elsewhere."""
    if request.param == "memory":
        MemoryFileSystem().pipe_file("/through/a", DATA)
    (tmp_path / "a").write_bytes(DATA)
    storage = open_storage("memory://through" if request.param == "memory" else tmp_path)
    with storage.open("a") as opened:
        yield opened, storage.root is None


def _readers() -> set[threading.Thread]:
    """The threads that read ahead. Those that hang in another test's place stay."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("ckptguard-read")}


def test_every_byte_comes_once_in_order_and_is_told(reader):
    """In blocks, of which the last is shorter."""
    taken, told = [], []
    read_through(reader[0], taken.append, Pace(progress=told.append), block=BLOCK, remote=reader[1])
    assert b"".join(taken) == DATA
    assert [len(block) for block in taken] == told == [BLOCK] * 20 + [11]


def test_hold_ends_it_before_the_next_block(reader):
    """Whatever it raises comes out; no thread stays."""
    taken, before = [], _readers()

    def hold():
        if len(taken) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        read_through(reader[0], taken.append, Pace(hold=hold), block=BLOCK, remote=reader[1])
    assert b"".join(taken) == DATA[: 3 * BLOCK]
    assert not _readers() - before


def test_what_fails_while_taking_ends_the_requests_too(reader):
    """Nobody reads on after that."""
    before = _readers()

    def take(block):
        raise ValueError

    with pytest.raises(ValueError):
        read_through(reader[0], take, Pace(), block=BLOCK, remote=reader[1])
    assert not _readers() - before


@pytest.mark.parametrize(("rate", "ahead"), [(None, IN_FLIGHT), (1e9, 1)])
def test_few_blocks_are_held(monkeypatch, rate, ahead):
    """Those that are asked for ahead; with a rate one, for it is read before its turn."""
    MemoryFileSystem().pipe_file("/through/a", DATA)
    asked, taken = [], []
    real = RemoteReader.read

    def read(self, offset, length):
        asked.append(length)
        return real(self, offset, length)

    def take(block):
        taken.append(len(block))
        assert len(asked) <= len(taken) + ahead

    monkeypatch.setattr(RemoteReader, "read", read)
    with open_storage("memory://through").open("a") as reader:
        read_through(reader, take, Pace(rate), block=BLOCK, remote=True)
    assert sum(taken) == len(DATA)


class _Parts:
    """Keeps what it is given."""

    parallel = 1

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}

    def put(self, number: int, data: bytes) -> None:
        self.parts[number] = data

    def finish(self, *, exclusive: bool) -> None:
        pass

    def abandon(self) -> None:
        pass


def test_a_block_that_is_a_part_is_sent_as_it_is(monkeypatch):
    """Only bytes, which nobody can change meanwhile, and only where nothing came before them in the part."""
    monkeypatch.setattr("ckptguard.storage.remote.upload.SMALLEST_PART", BLOCK)
    parts = _Parts()
    upload = RemoteUpload("k", "x", lambda: parts, lambda data: None, lambda: None, replace=False, retries=Retries())
    blocks = [DATA[:BLOCK], bytearray(DATA[BLOCK : 2 * BLOCK]), DATA[2 * BLOCK : 2 * BLOCK + 7]]
    blocks += [DATA[2 * BLOCK + 7 : 3 * BLOCK + 7], DATA[3 * BLOCK + 7 :]]
    for block in blocks:
        upload.write(block)
        if isinstance(block, bytearray):
            block[:] = bytes(len(block))
    upload.commit()
    assert b"".join(parts.parts[n] for n in sorted(parts.parts)) == DATA
    assert [len(parts.parts[n]) for n in sorted(parts.parts)] == [BLOCK] * 20 + [11]
    assert parts.parts[0] is blocks[0]


def test_the_body_of_a_part_is_like_any_file_of_bytes():
    """Read, told its length, read again from its beginning; and never copied for its length."""
    body, plain = _Body(DATA), io.BytesIO(DATA)
    assert len(body.getbuffer()) == len(plain.getbuffer())
    assert bytes(body.getbuffer()) == body.read() == plain.read()
    body.seek(5)
    assert body.read(10) == DATA[5:15]
    assert body.getbuffer().obj is DATA


@pytest.mark.parametrize("tries", [1, 5])
def test_a_part_is_sent_whole_at_every_try(tries):
    """s3fs makes the same call again, with what the one before has read to its end."""

    class Store:
        retries, got = tries, b""

        def split_path(self, path):
            return "bucket", path, None

        def call_s3(self, name, **given):
            body = given.get("Body", b"")
            for _ in range(self.retries):  # botocore wraps bytes anew in each call
                self.got = (io.BytesIO(body) if isinstance(body, bytes) else body).read()
            return {"UploadId": "u", "ETag": "e"}

    store = Store()
    S3Parts(store, "key").put(0, DATA)
    assert store.got == DATA
