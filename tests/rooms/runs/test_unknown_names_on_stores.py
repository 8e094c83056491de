"""On an object store, too, files with unknown names are read or named; each costs one request as long as it stays."""

from __future__ import annotations

import random
import uuid
from pathlib import Path

import pytest
import torch
from servers.fixtures import S3_BUCKETS, served
from support.counting_storage import counted
from support.runs import QUICK, state_dict
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.runs import not_understood
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.not_understood import find_not_understood, state_files
from ckptguard.upkeep.reconcile import PassNotes, reconcile


@pytest.fixture(params=["memory", "s3"])
def url(request) -> str:
    """A place for one run."""
    name = f"run-{uuid.uuid4().hex[:12]}"
    if request.param == "memory":
        return f"memory://{name}"
    request.getfixturevalue("moto")
    return f"s3://{S3_BUCKETS[0]}/{name}"


def put(url: str, name: str, content: bytes) -> None:
    """Another program writes an object."""
    storage = open_run(url, served(QUICK), must_exist=False).storage
    storage.remove(name)
    storage.create(name, content)


def saved(folder: Path, step: int, *, sick: bool = False) -> bytes:
    """The bytes of a save by torch."""
    state = state_dict(step)
    if sick:
        state["embed.weight"][0, 0] = torch.nan
    torch.save({"generator": state}, folder / "save")
    return (folder / "save").read_bytes()


def test_saves_without_a_suffix_are_judged_on_a_store(tmp_path, url):
    """HiFi-GAN's ``g_00000300``: NaN is seen, and the save before is known-good."""
    settings = served(QUICK)
    for step in (200, 300):
        put(url, f"g_{step:08d}", saved(tmp_path, step, sick=step == 300))
        reconcile(look(url, settings), PassNotes())
    assert find_known_good(open_run(url, settings)).path.endswith("g_00000200")


def test_what_nobody_reads_is_named_on_a_store(url):
    """With one request for each object while it stays, in one process."""
    settings, noise = served(QUICK), random.Random(1).randbytes(5000)
    put(url, "policy.msgpack", b"\x82\xa6params" + noise)
    put(url, "train.log", noise)
    found = look(url, settings).listing.not_understood
    assert found is not None
    assert found.paths == ("policy.msgpack",)
    view = look(url, settings)
    run, requests = counted(view.run)
    assert find_not_understood(run, view.listing.entries) == found
    assert requests == {}
    put(url, "policy.msgpack", b"\x83\xa6params" + noise)
    view = look(url, settings)
    run, requests = counted(view.run)
    assert find_not_understood(run, view.listing.entries) == found
    assert requests == {}  # the listing has read it


def test_of_many_only_a_few_are_read_at_once(url, monkeypatch):
    """The others are named until a later look reads them."""
    monkeypatch.setattr(not_understood, "_MOST_REQUESTS", 3)
    settings = served(QUICK)
    for n in range(5):
        put(url, f"notes_{n}", b"loss 0.5\n" * 300)
    run, entries = open_run(url, settings), look(url, settings).run.storage.list("", recursive=True)
    assert state_files(run, entries) == frozenset()
    assert find_not_understood(run, entries) is None  # three and two
