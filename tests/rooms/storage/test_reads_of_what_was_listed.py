"""What is read is what was listed, or it is refused, whatever a server understands of the condition."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from servers.faulty_proxy import FaultyProxy
from servers.fixtures import S3_BUCKETS
from servers.s3 import S3Server

from ckptguard.errors import ChangedWhileReadError
from ckptguard.storage import open_storage
from ckptguard.storage.protocol import Storage
from ckptguard.storage.remote.listed_storage import ListedRun
from ckptguard.storage.remote.remote_storage import ConditionalReader
from ckptguard.values.storage_options import StorageOptions

SIZES = (1, 6_000, 1 << 20, (1 << 20) + 1, 3 << 20)  # up to a mebibyte an object is one request
SERVERS = {
    "honest": ((), ()),
    "it ignores the condition": (("If-Match",), ()),
    "it sends no tag with the bytes": ((), ("ETag",)),
    "neither": (("If-Match",), ("ETag",)),
}


@pytest.fixture(params=SERVERS)
def proxy(moto: S3Server, request: pytest.FixtureRequest) -> Iterator[FaultyProxy]:
    """A server that understands some of it, or all."""
    unheard, unsaid = SERVERS[request.param]
    with FaultyProxy(moto.endpoint, unheard=unheard, unsaid=unsaid).running() as running:
        yield running


@pytest.fixture
def storage(moto: S3Server, proxy: FaultyProxy) -> Storage:
    """A folder behind it."""
    options = S3Server(proxy.url, moto.key, moto.secret).options
    url = f"s3://{S3_BUCKETS[0]}/listed-{uuid.uuid4().hex}"
    return open_storage(url, must_exist=False, options=StorageOptions({f"s3://{S3_BUCKETS[0]}": options}))


def test_other_bytes_are_never_read(moto: S3Server, storage: Storage) -> None:
    """An object is replaced by one of equal or another size, before or between the reads, or by equal bytes."""
    client, chance = moto.client(), random.Random(5)
    bucket, _, folder = storage.url.removeprefix("s3://").partition("/")
    read = refused = 0
    for round_ in range(30):
        size = SIZES[round_ % len(SIZES)]
        was = chance.randbytes(size)
        now = was if chance.random() < 0.2 else chance.randbytes(max(1, size + chance.choice((-3, 0, 0, 0, 5))))
        key = f"{folder}/{round_}"
        client.put_object(Bucket=bucket, Key=key, Body=was)
        listed = next(entry for entry in storage.list() if entry.key == str(round_))
        ends = sorted({chance.randrange(size), size} - {0})
        parts = [(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if begin < end]
        replaced_at = chance.randrange(len(parts) + 1)
        with storage.open_listed(listed) as reader:
            for number, (begin, end) in enumerate(parts):
                if number == replaced_at:
                    client.put_object(Bucket=bucket, Key=key, Body=now)
                try:
                    assert reader.read(begin, end - begin) == was[begin:end]
                    read += 1
                except ChangedWhileReadError:
                    assert number >= replaced_at
                    assert now != was
                    refused += 1
    assert read > 20
    assert refused > 10


@pytest.mark.parametrize("is_looking", [True, False])
def test_a_look_reads_what_was_listed(moto: S3Server, storage: Storage, is_looking: bool) -> None:
    """Through the storage of a look, while it is under way and after its end."""
    client, seen = moto.client(), ListedRun(storage, storage, "records")
    bucket, _, folder = storage.url.removeprefix("s3://").partition("/")
    for size in SIZES:
        was, now = bytes(size), b"\1" * size
        client.put_object(Bucket=bucket, Key=f"{folder}/{size}", Body=was)
        with contextlib.ExitStack() as look:
            look.enter_context(seen.look())
            [listed] = [entry for entry in seen.storage.list() if entry.key == str(size)]
            if not is_looking:
                look.close()
            with seen.storage.open_listed(listed) as reader:
                assert reader.read(0, size) == was
            client.put_object(Bucket=bucket, Key=f"{folder}/{size}", Body=now)
            with seen.storage.open_listed(listed) as reader, pytest.raises(ChangedWhileReadError):
                reader.read(0, size)


@pytest.mark.parametrize("stale_stat", [False, True])
def test_an_answer_with_the_tag_of_one_object_and_the_bytes_of_the_next(
    moto: S3Server,
    storage: Storage,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    stale_stat: bool,
) -> None:
    """The bytes of a small object are compared with a tag that is their MD5, also where for a moment all of the store's
    answers name the old tag. A store that heeds no condition and names no tag then cannot be seen through."""
    if stale_stat and request.node.callspec.params["proxy"] == "neither":
        return
    client = moto.client()
    bucket, _, folder = storage.url.removeprefix("s3://").partition("/")
    honest = ConditionalReader._get
    tag = ""

    async def mixed(reader: ConditionalReader, *asked: Any) -> tuple[bytes, str | None]:
        if stale_stat:
            monkeypatch.setattr(ConditionalReader, "_get", honest)
        tagged, reader.entry = reader.entry, present
        try:
            return (await honest(reader, *asked))[0], tag
        finally:
            reader.entry = tagged

    client.put_object(Bucket=bucket, Key=f"{folder}/0", Body=bytes(6000))
    [listed] = storage.list()
    tag = listed.etag or ""
    with storage.open_listed(listed) as reader:
        assert reader.read(0, 6000) == bytes(6000)
    client.put_object(Bucket=bucket, Key=f"{folder}/0", Body=b"\1" * 6000)
    present = storage.stat("0")
    monkeypatch.setattr(ConditionalReader, "_get", mixed)
    if stale_stat:
        monkeypatch.setattr(ConditionalReader, "_tag_now", lambda reader: tag)
    with storage.open_listed(listed) as reader, pytest.raises(ChangedWhileReadError):
        reader.read(0, 6000)


def test_a_listed_object_without_a_tag(moto: S3Server, storage: Storage) -> None:
    """It is known by its size and time; another one is not opened for it."""
    client = moto.client()
    bucket, _, folder = storage.url.removeprefix("s3://").partition("/")
    client.put_object(Bucket=bucket, Key=f"{folder}/0", Body=bytes(6000))
    listed = msgspec.structs.replace(storage.stat("0"), etag=None)
    client.put_object(Bucket=bucket, Key=f"{folder}/0", Body=bytes(6001))
    with pytest.raises(ChangedWhileReadError):
        storage.open_listed(listed)
