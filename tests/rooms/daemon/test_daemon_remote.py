"""A daemon that guards a run on an object store, by polling."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import torch
from servers.fixtures import S3_BUCKETS
from servers.s3 import S3Server
from support.daemon_process import DaemonProcess, Starter, save

import ckptguard
from ckptguard.records.run import list_records, open_run, read_record
from ckptguard.runs.history import load_history
from ckptguard.values.settings import Settings


def test_saves_on_a_store_are_found_read_back_and_judged_and_no_secret_gets_out(
    tmp_path: Path, moto: S3Server, start: Starter
) -> None:
    """Foreign files and our own layout get verdicts, damage is found when it is asked for, and the store's secret is
    in no record, no log and no command line."""
    folder = f"run-{uuid.uuid4().hex[:12]}"
    url: Any = f"s3://{S3_BUCKETS[0]}/{folder}"
    client = moto.client()

    def put(path: Path) -> None:
        client.upload_file(str(path), S3_BUCKETS[0], f"{folder}/{path.name}")

    put(save(tmp_path, 100))
    options = json.dumps({f"s3://{S3_BUCKETS[0]}": moto.options})
    daemon: DaemonProcess = start(url, CKPTGUARD_STORAGE=options, CKPTGUARD_KEEP="none")
    assert daemon.known_good(100)["path"] == f"{url}/net-100.safetensors"
    put(save(tmp_path, 200, nan=True))
    assert daemon.outcome(200) == "bad"
    model = torch.nn.Linear(30, 20)
    settings = Settings(storage={f"s3://{S3_BUCKETS[0]}": moto.options})
    guard = ckptguard.TrainingGuard(url, model=model, daemon="off", settings=settings)
    guard.save(step=300)
    assert daemon.outcome(300) == "good"

    run = open_run(url, settings)
    history = load_history(run)
    for series in history.names:
        for key in history.current_verdicts(series):
            verdict = history.verdict(key)
            assert verdict is not None
            assert verdict.read_back == "bytes"
    damaged = bytearray(client.get_object(Bucket=S3_BUCKETS[0], Key=f"{folder}/net-100.safetensors")["Body"].read())
    damaged[-100] ^= 1
    client.put_object(Bucket=S3_BUCKETS[0], Key=f"{folder}/net-100.safetensors", Body=bytes(damaged))
    assert daemon.post("verify", {"path": "net-100.safetensors"})[0] == 202
    daemon.logged("verified", id="100.1", outcome="bad")

    secret = moto.secret.encode()
    told = [daemon.log_path.read_bytes(), Path(f"/proc/{daemon.process.pid}/cmdline").read_bytes()]
    for task in Path(f"/proc/{daemon.process.pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            told.append(Path(f"/proc/{child}/cmdline").read_bytes())
    told += [read_record(run, key) or b"" for key in list_records(run, "", recursive=True)]
    assert sum(map(len, told)) > 1000
    assert not [text for text in told if secret in text]
    assert daemon.stop() == 0
