"""A store that is often busy costs no verdict, and little time."""

from __future__ import annotations

import secrets
from types import SimpleNamespace

import pytest
from servers.faulty_proxy import FaultyProxy
from servers.fixtures import S3_BUCKETS
from servers.s3 import S3Server
from support.tiny_files import WEIGHTS, content

from ckptguard.storage import opening
from ckptguard.values.settings import Settings
from ckptguard.values.storage_options import StorageOptions
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

pytest.importorskip("s3fs")


def test_busy_answers_cost_no_verdict(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 40 of 100 answers "slow down", every checkpoint is good, and each busy answer cost less than a second."""
    waits: list[float] = []
    real = opening._short_wait

    def noted(**given: object) -> float | None:
        found = real(**given)  # type: ignore[arg-type]
        waits.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(opening, "_short_wait", noted)
    run = f"busy-{secrets.token_hex(4)}"
    for step in (1, 2):
        moto.client().put_object(Bucket=S3_BUCKETS[0], Key=f"{run}/net-{step}.safetensors", Body=content(step)[WEIGHTS])
    with FaultyProxy(moto.endpoint, share=0.4, faults=["busy"]).running() as proxy:
        behind = S3Server(proxy.url, moto.key, moto.secret).options
        settings = Settings(settle=0.0, storage=StorageOptions({f"s3://{S3_BUCKETS[0]}": behind}))
        report = verify_target(f"s3://{S3_BUCKETS[0]}/{run}", settings)
    assert (len(report.checkpoints), report.outcome) == (2, Outcome.GOOD)
    assert proxy.counts["busy"] > 10
    assert proxy.counts["busy"] - len(waits) < proxy.counts["busy"] / 4  # the rest waits for our own turns
    assert max(waits) <= 0.4


def test_who_says_how_to_retry_is_heard() -> None:
    """The user's own `retries` are botocore's alone, and other answers wait as botocore says."""
    for config, hooked in (({}, True), ({"retries": {"total_max_attempts": 1}}, False)):
        options = StorageOptions({"s3": {"key": "k", "secret": "s", "config_kwargs": config}})
        storage = opening.open_remote(f"s3://bucket-{hooked}/run", options=options)
        assert ("event_hooks" in storage._fs.kwargs) is hooked  # type: ignore[attr-defined]
    for status, attempts in ((200, 1), (400, 1), (403, 1), (503, 5)):
        assert opening._short_wait(attempts, (SimpleNamespace(status_code=status), {})) is None
    assert opening._short_wait(1, None) is None
