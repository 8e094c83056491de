"""Hints from an object store, by an SQS queue that its notifications go to: S3's own, those of EventBridge, and either
of them by SNS. A hint wakes the run that it names. It is never more than that: what a run holds is what a listing says.
So a queue that fails, lies, repeats, delays or floods changes when something is noticed, and nothing else."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote_plus, urlsplit

import msgspec

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.storage.redaction import keep_out, redacted, secrets_in
from ckptguard.values.ids import RECORDS_FOLDER, escape
from ckptguard.values.settings import Settings
from ckptguard_daemon.log import log

_WAIT = 10  # seconds for which the queue holds a request that finds nothing
_ALIVE = 60.0  # seconds without an answer, after which nobody relies on hints
_SHORTEST, _LONGEST = 1.0, 60.0  # seconds until a queue that failed is asked again
_AT_ONCE = 10  # messages; the most that SQS gives
_GAP = 5.0  # seconds between two looks by hints at one run, or two searches: each is a listing that costs money
_SEARCH = ""  # stands for a search among the runs to wake
_REGION = re.compile(r"(?:^|[.-])sqs[.-]([a-z]{2}[a-z-]*-\d+)\.|^([a-z]{2}[a-z-]*-\d+)\.queue\.")
_TELLING = ("manifests", "incidents", "silences")  # our records that others write


class HintQueue:
    """Receives hints until `stop` is set, in the thread that calls `run`. `wake` is called with the run that one is
    about, and `search` for one in a folder of no known run."""

    def __init__(
        self,
        settings: Settings,
        runs: Iterable[WatchedRun],
        wake: Callable[[str], None],
        search: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        self._url, self._options = settings.hints or "", settings.storage.for_url(settings.hints or "")
        keep_out(secrets_in(self._options))
        self._runs, self._wake, self._search, self._stop = runs, wake, search, stop
        self._answered_at = float("-inf")  # monotonic
        self._due: set[str] = set()  # ids of runs to wake
        self._woken: dict[str, float] = {}  # when each was woken last, monotonic

    def is_alive(self) -> bool:
        """True while the queue answers."""
        return time.monotonic() < self._answered_at + _ALIVE

    def run(self) -> None:
        """Receive. Whatever fails is logged once, and tried again."""
        pause, client = 0.0, None
        while not self._stop.wait(pause):
            try:
                client = client or self._client()
                self._receive(client)
                if pause:
                    log("hints_received", queue=redacted(self._url))
                pause, self._answered_at = 0.0, time.monotonic()
            except Exception as error:  # of a library, of the network, or in a message
                if not pause:
                    reason = escape(redacted(" ".join(f"{error}".split()))[:300])
                    log("hints_failed", level="warning", queue=redacted(self._url), reason=reason)
                pause, client = min(max(2 * pause, _SHORTEST), _LONGEST), None
                if self._answered_at > float("-inf") and not self.is_alive():
                    self._answered_at = float("-inf")
                    for run in self._runs:  # each looks as often as without hints from now on
                        self._wake(run.run_id)

    def _client(self) -> Any:
        try:
            from botocore.config import Config
            from botocore.session import Session
        except ImportError as error:
            raise RuntimeError('hints need botocore: pip install "ckptguard[s3]"') from error
        options = self._options
        place, more = urlsplit(self._url), dict(options.get("client_kwargs") or {})
        found = _REGION.search(place.hostname or "")
        region = None if found is None else found[1] or found[2]
        # Several daemons may have a queue each, and none waits long for a network that is away.
        config = Config(connect_timeout=5, read_timeout=_WAIT + 5, retries={"total_max_attempts": 1})
        return Session(profile=options.get("profile")).create_client(
            "sqs",
            region_name=more.get("region_name") or region or "us-east-1",
            endpoint_url=options.get("endpoint_url") or f"{place.scheme}://{place.netloc}",
            aws_access_key_id=options.get("key"),
            aws_secret_access_key=options.get("secret"),
            aws_session_token=options.get("token"),
            config=config,
        )

    def _receive(self, client: Any) -> None:
        """Take some messages, wake who they are about, and remove them. A message that is no hint stays for its own
        reader."""
        wait = math.ceil(_GAP) if self._due else _WAIT
        found = client.receive_message(QueueUrl=self._url, MaxNumberOfMessages=_AT_ONCE, WaitTimeSeconds=wait)
        done = []
        for number, message in enumerate(found.get("Messages") or ()):
            places = places_in(message.get("Body") or "")
            if places is None:
                continue
            self._hint(places)
            done.append({"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]})
        self._wake_due()
        if done:
            client.delete_message_batch(QueueUrl=self._url, Entries=done)
        elif found.get("Messages"):
            self._stop.wait(_SHORTEST)  # what stays may come again at once

    def _hint(self, places: list[str]) -> None:
        known = {run.url.partition("://")[2].rstrip("/"): run for run in self._runs if "://" in run.url}
        for place in places:
            run, inside = _run_of(place, known)
            if run is None:
                self._due.add(_SEARCH)
            elif inside[0] != RECORDS_FOLDER or (len(inside) > 2 and inside[1] in _TELLING):
                run.hint()
                self._due.add(run.run_id)

    def _wake_due(self) -> None:
        """Wake what is due, each at most every few seconds. The last hint of many is never lost."""
        now = time.monotonic()
        for id in [id for id in self._due if now >= self._woken.get(id, float("-inf")) + _GAP]:
            self._due.discard(id)
            self._woken[id] = now
            if id == _SEARCH:
                self._search()
            else:
                self._wake(id)


def _run_of(place: str, known: dict[str, WatchedRun]) -> tuple[WatchedRun | None, list[str]]:
    """Return the run that an object is in, and the parts of its name in the run."""
    parts = place.split("/")
    for count in range(len(parts) - 1, 0, -1):
        run = known.get("/".join(parts[:count]))
        if run is not None:
            return run, parts[count:]
    return None, parts


def places_in(body: str) -> list[str] | None:
    """Return the objects that a message is about, each as BUCKET/KEY. None if it is no notification of S3."""
    try:
        found = msgspec.json.decode(body)
        if isinstance(found, dict) and isinstance(found.get("Message"), str):  # SNS put it into one of its own
            found = msgspec.json.decode(found["Message"])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if found.get("Event") == "s3:TestEvent":
        return []
    if found.get("source") == "aws.s3":
        return list(_places([found.get("detail")], lambda key: key))
    records = found.get("Records")
    if not isinstance(records, list):
        return None
    from_s3 = [r.get("s3") for r in records if isinstance(r, dict) and r.get("eventSource") == "aws:s3"]
    return list(_places(from_s3, unquote_plus)) if from_s3 else None


def _places(objects: Iterable[object], key_of: Callable[[str], str]) -> Iterator[str]:
    for one in objects:
        if isinstance(one, dict):
            bucket, key = _text(one.get("bucket"), "name"), _text(one.get("object"), "key")
            if bucket and key:
                yield f"{bucket}/{key_of(key)}"


def _text(table: object, name: str) -> str:
    found = table.get(name) if isinstance(table, dict) else None
    return found if isinstance(found, str) else ""
