"""Hints from an object store: they change when something is noticed, and nothing else."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
from ckptguard_daemon import hints
from ckptguard_daemon.hints import HintQueue, places_in
from hypothesis import given
from hypothesis import strategies as st
from servers.faulty_proxy import FaultyProxy
from servers.moto_server import moto_server
from servers.s3 import S3Server
from support.daemon_process import DaemonProcess, Starter, save
from support.store_runs import StoreRun, look

from ckptguard.decisions.store_requests import LONGEST_PAUSE
from ckptguard.values.settings import Settings

BUCKET = "ckptguard-hints"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(["aws:s3", "s3", "bucket", "name", "object", "key", "Records", "source", "detail", "Message"])
NEARLY = st.recursive(
    st.text(max_size=5) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner),
    max_leaves=20,
)


def of_s3(bucket: str, key: str) -> dict[str, Any]:
    """A notification as S3 sends it."""
    told = {"bucket": {"name": bucket}, "object": {"key": quote_plus(key)}}
    return {"Records": [{"eventSource": "aws:s3", "eventName": "ObjectCreated:Put", "s3": told}]}


def of_event_bridge(bucket: str, key: str) -> dict[str, Any]:
    """The same as EventBridge sends it."""
    detail = {"bucket": {"name": bucket}, "object": {"key": key}}
    return {"source": "aws.s3", "detail-type": "Object Created", "detail": detail}


def by_sns(made: dict[str, Any]) -> dict[str, Any]:
    """The same in an envelope of SNS."""
    return {"Type": "Notification", "Message": json.dumps(made)}


@given(bucket=st.from_regex(r"[a-z]{3,9}", fullmatch=True), key=st.text(min_size=1, max_size=20))
def test_each_form_names_its_object(bucket, key):
    """Whatever the key is made of."""
    for form in (of_s3(bucket, key), of_event_bridge(bucket, key)):
        for sent in (form, by_sns(form)):
            assert places_in(json.dumps(sent)) == [f"{bucket}/{key}"]


@given(
    body=st.text(max_size=30)
    | JSON.map(json.dumps)
    | NEARLY.map(json.dumps)
    | NEARLY.map(lambda x: json.dumps({"Records": x}))
)
def test_other_messages_are_no_hints(body):
    """They raise nothing, and name no more than texts."""
    found = places_in(body)
    assert found is None or all(isinstance(place, str) for place in found)


def test_a_bomb_is_no_hint():
    """Deep nesting in a message, or in one of SNS."""
    deep = "[" * 100_000
    assert places_in(deep) is places_in(json.dumps({"Message": deep})) is None


class Recorder:
    """In place of a guarded run."""

    def __init__(self, url: str) -> None:
        self.url = self.run_id = url
        self.hinted = 0

    def hint(self) -> None:
        self.hinted += 1


class Queue:
    """In place of SQS: answers in turn, and then the daemon stops."""

    def __init__(self, answers: list[Any], stop: threading.Event) -> None:
        self.answers, self.stop, self.removed = answers, stop, []

    def receive_message(self, **asked: Any) -> Any:
        answer = self.answers.pop(0)
        if not self.answers:
            self.stop.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def delete_message_batch(self, *, Entries: list[Any], **asked: Any) -> None:  # noqa: N803 - the library's name
        self.removed += [entry["ReceiptHandle"] for entry in Entries]


def received(
    answers: list[Any], urls: list[str], monkeypatch: pytest.MonkeyPatch, gap: float = 0.0
) -> tuple[Queue, list[str], list[Any]]:
    """The queue after it gave these answers, what was woken (None: a search), and the runs."""
    stop, woken, runs = threading.Event(), [], [Recorder(url) for url in urls]
    queue = Queue(answers, stop)
    monkeypatch.setattr(hints, "_SHORTEST", 0.0)
    monkeypatch.setattr(hints, "_GAP", gap)
    monkeypatch.setattr(HintQueue, "_client", lambda self: queue)
    settings = Settings(hints="https://sqs.example/1/q")
    HintQueue(settings, runs, woken.append, lambda: woken.append(""), stop).run()  # type: ignore[arg-type]
    return queue, woken, runs


def messages(*bodies: Any) -> dict[str, Any]:
    """An answer with these messages."""
    texts = [body if isinstance(body, str) else json.dumps(body) for body in bodies]
    return {"Messages": [{"Body": text, "ReceiptHandle": text} for text in texts]}


def test_a_hint_wakes_its_run_alone(monkeypatch):
    """The innermost run of a key; our own records wake nobody, but those that others write; what is in no run may be a
    new one; what is no notification stays in the queue."""
    urls = ["s3://b/runs/one", "s3://b/runs/one/inner", "s3a://b/two", "/local/b/three"]
    told = [
        (of_s3("b", "runs/one/model-1.pt"), "s3://b/runs/one"),
        (of_s3("b", "runs/one/inner/x/model-1.pt"), "s3://b/runs/one/inner"),
        (of_s3("b", "two/model 1.pt"), "s3a://b/two"),
        (of_s3("b", "two/_ckptguard/ledger/1.json"), None),
        (of_s3("b", "two/_ckptguard/manifests/s/1.json"), "s3a://b/two"),
        (of_s3("b", "local/b/three/x"), ""),
        (of_s3("b", "runs/one-more/model.pt"), ""),
        ({"Event": "s3:TestEvent"}, None),
    ]
    queue, woken, runs = received([messages(*(sent for sent, _ in told), "not ours")], urls, monkeypatch)
    assert sorted(woken) == sorted({run for _, run in told if run is not None})
    assert queue.removed == [json.dumps(sent) for sent, _ in told]
    assert [run.hinted for run in runs] == [1, 1, 2, 0]


def test_a_flood_costs_few_listings(monkeypatch):
    """Each run is woken once, and the search made once, however often they are named within some seconds. The last
    hint is not lost: once they are over, each is woken again."""
    urls, now = ["s3://b/one", "s3://b/two"], [0.0]
    flood = [messages(*(of_s3("b", f"{name}/{n}") for name in ("one", "two", "three"))) for n in range(50)]
    monkeypatch.setattr(hints.time, "monotonic", lambda: now[0])
    _, woken, runs = received([*flood], urls, monkeypatch, gap=5.0)
    assert sorted(woken) == ["", *urls]
    assert [run.hinted for run in runs] == [50, 50]

    class Late(dict):
        def get(self, *asked: Any) -> Any:
            now[0] += 5.0
            return super().get(*asked)

    _, woken, _ = received([*flood, Late()], urls, monkeypatch, gap=5.0)
    assert sorted(woken) == ["", "", *sorted(2 * urls)]


def test_a_queue_that_fails_is_asked_again(monkeypatch):
    """Whatever it answers, and each hint arrives that it gives."""
    hint = of_s3("b", "run/x")
    answers = [OSError("away"), messages(hint), {"Messages": [{"Body": None}]}, 7, {}, ValueError("?"), messages(hint)]
    queue, woken, _ = received(answers, ["s3://b/run"], monkeypatch)
    assert woken == ["s3://b/run"] * 2
    assert queue.answers == []


def test_all_look_again_as_usual_once_the_queue_is_silent(monkeypatch):
    """Each run is woken, so that it makes its own pauses."""
    monkeypatch.setattr(hints, "_ALIVE", 0.0)
    _, woken, _ = received([{}, OSError("away"), OSError("away")], ["s3://b/one", "/two"], monkeypatch)
    assert woken == ["s3://b/one", "/two"]


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 and an SQS, with a bucket whose notifications go to a queue."""
    pytest.importorskip("moto", reason='no moto here: pip install "ckptguard[servers]"')
    with moto_server(tmp_path_factory.mktemp("moto"), threads=True) as running:
        client = running.client()
        client.create_bucket(Bucket=BUCKET)
        arn = sqs(running).get_queue_attributes(QueueUrl=queue_of(running), AttributeNames=["QueueArn"])
        target = {"QueueArn": arn["Attributes"]["QueueArn"], "Events": ["s3:ObjectCreated:*"]}
        client.put_bucket_notification_configuration(
            Bucket=BUCKET, NotificationConfiguration={"QueueConfigurations": [target]}
        )
        yield running


def sqs(server: S3Server) -> Any:
    """boto's client of the queue's service."""
    import boto3

    return boto3.client(
        "sqs",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name="us-east-1",
    )


def queue_of(server: S3Server) -> str:
    """The URL of the queue."""
    return str(sqs(server).create_queue(QueueName="ckptguard-hints")["QueueUrl"])


def test_a_save_is_seen_by_its_hint(tmp_path: Path, moto: S3Server, start: Starter) -> None:
    """A real daemon, which looks by its timer every hour; the bucket's own notifications are in a real queue."""
    folder, client = f"run-{uuid.uuid4().hex[:12]}", moto.client()

    def put(path: Path) -> None:
        client.upload_file(str(path), BUCKET, f"{folder}/{path.name}")

    put(save(tmp_path, 100))
    queue = queue_of(moto)
    options = {f"s3://{BUCKET}": moto.options, moto.endpoint: {"key": moto.key, "secret": moto.secret}}
    assert queue.startswith(moto.endpoint)
    more = {"CKPTGUARD_HINTS": queue, "CKPTGUARD_SCAN_INTERVAL": "3600", "CKPTGUARD_KEEP": "none"}
    daemon: DaemonProcess = start(f"s3://{BUCKET}/{folder}", CKPTGUARD_STORAGE=json.dumps(options), **more)
    assert daemon.known_good(100)
    for step in (200, 300):
        put(save(tmp_path, step))
        daemon.logged("verified", step=step, outcome="good")
    assert daemon.stop() == 0


@pytest.fixture
def run(moto: S3Server, tmp_path: Path) -> Iterator[StoreRun]:
    """A run behind a proxy that counts."""
    with FaultyProxy(moto.endpoint).running() as proxy:
        yield StoreRun(moto, proxy, BUCKET, f"run-{uuid.uuid4().hex[:12]}", tmp_path)


def test_pauses_follow_the_hints_that_proved_right(run: StoreRun) -> None:
    """A run at rest is listed every 15 minutes if the change before was hinted at, and the queue answers; otherwise as
    often as without hints. A hint that is wrong, or comes again, changes no verdict."""
    for step in (10, 20):
        run.save(step)
    guarded, alive = run.guard(), True
    guarded.hears = lambda: alive

    def rest() -> float:
        while (done := look(guarded)).checked or done.pending:
            pass
        look(guarded)
        return float(guarded._pause)

    def usual() -> bool:
        return rest() < LONGEST_PAUSE

    assert usual()  # nothing proves yet that hints come
    run.save(30)
    guarded.hint()
    assert not usual()
    run.save(40)
    assert usual()  # that came without one
    run.save(50)
    guarded.hint()
    assert not usual()
    alive = False
    assert usual()
    alive = True
    for _ in range(3):
        guarded.hint()  # of nothing
        assert [c.outcome for c in look(guarded).checked] == []
    assert guarded.verdicts == 5
