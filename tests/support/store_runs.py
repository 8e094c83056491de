"""A run of Transformers' Trainer on an S3 server, and a daemon's passes over it, made one by one."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

from ckptguard_daemon.catalogue_feed import CatalogueFeed
from servers.faulty_proxy import FaultyProxy
from servers.s3 import S3Server

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.runs.work import Work
from ckptguard.scan import scan_files
from ckptguard.upkeep.reconcile import PassResult
from ckptguard.values.settings import Settings
from support.layouts import write_trainer
from support.served_runs import of_this_process, watched


class StoreRun:
    """A run that is saved past the proxy, and guarded through it."""

    def __init__(self, server: S3Server, proxy: FaultyProxy, bucket: str, name: str, folder: Path) -> None:
        self.client: Any = server.client()
        self.bucket, self.name, self._folder = bucket, name, folder
        self.url = f"s3://{bucket}/{name}"
        self.direct = {f"s3://{bucket}": server.options}
        behind = S3Server(proxy.url, server.key, server.secret)
        self.settings = Settings(settle=0.0, storage={f"s3://{bucket}": behind.options})

    def save(self, step: int, *, seed: int | None = None) -> None:
        """Upload a save of six files."""
        place = self._folder / uuid.uuid4().hex
        name = write_trainer(place, step, step if seed is None else seed)
        for file in sorted((place / name).iterdir()):
            self.put(f"{name}/{file.name}", file.read_bytes())

    def put(self, key: str, data: bytes) -> None:
        """Upload one object."""
        self.client.put_object(Bucket=self.bucket, Key=f"{self.name}/{key}", Body=data)

    def get(self, key: str) -> bytes:
        """Return one object."""
        body = self.client.get_object(Bucket=self.bucket, Key=f"{self.name}/{key}")["Body"]
        return bytes(body.read())

    def guard(self, settings: Settings | None = None) -> WatchedRun:
        """Guard it, as a daemon that listens somewhere."""
        return watched(self.url, settings or self.settings, presence=of_this_process(), feed=CatalogueFeed())


def look(run: WatchedRun) -> PassResult:
    """Make one pass, which must succeed."""
    done = run.step(Work(scanner=scan_files, stop=threading.Event()))
    assert done is not None, run.trouble
    return done
