"""Order: contents under a fixed name, several numbers in a name, and the newest of several series."""

from __future__ import annotations

import itertools
import random
import uuid
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from servers.fixtures import S3_BUCKETS, served
from support.counting_storage import counted
from support.runs import QUICK, state_dict
from support.views import look

from ckptguard.errors import NoKnownGoodError
from ckptguard.inspect.status import status
from ckptguard.layouts.step_names import is_part, step_from_name
from ckptguard.records.run import open_run
from ckptguard.runs import not_understood
from ckptguard.runs.find_known_good import SURE, find_known_good, known_good_candidates
from ckptguard.runs.not_understood import find_not_understood, state_files
from ckptguard.runs.run_view import open_view
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId, id_from_record, numbers_of, parse_id, series_folder
from ckptguard.values.settings import Settings
from ckptguard.verification import seal
from ckptguard.verification.target import verify_target

_NUMBERS = st.lists(st.integers(0, 10**12 - 1), max_size=4).map(tuple)


def _save(path, number, *, optimizer=True, nan=False, **beside):
    torch.manual_seed(number)
    model = torch.nn.Linear(4, 3)
    state = {"model": model.state_dict(), **beside}
    if optimizer:
        own = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 4)).sum().backward()
        own.step()
        state["optimizer"] = own.state_dict()
    if nan:
        state["model"]["weight"].fill_(float("nan"))
    torch.save(state, path)


def _verify(run):
    return verify_target(str(run), Settings(settle=0.0))


def _known_good(run, **wanted):
    return find_known_good(open_run(str(run), Settings()), **wanted)


@given(a=_NUMBERS, b=_NUMBERS, one=st.integers(1, 99), other=st.integers(1, 99))
def test_ids_travel_as_text_and_as_names_of_records(a, b, one, other):
    """Both forms of an id give it back, and the ids of a series are in the order of their numbers."""
    ids = [CheckpointId("s#", None if not n else n[0] if len(n) == 1 else n, g) for n, g in ((a, one), (b, other))]
    for id in ids:
        assert parse_id("s#", str(id)) == id
        assert id_from_record(series_folder("s#"), id.record_name) == id
        assert msgspec.json.decode(msgspec.json.encode(id), type=CheckpointId) == id
    assert (ids[0].order < ids[1].order) == ((a, one) < (b, other))


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("recovery-0-950.pth.tar", "recovery-1-50.pth.tar"),
        ("checkpoint_1_500.pt", "checkpoint_1_1000.pt"),
        ("CKPT+2026-11-21+23-59-59+00", "CKPT+2026-11-22+00-00-01+00"),
        ("epoch_3_batch_900.pt", "epoch_4_batch_5.pt"),
        ("val_0.91-epoch-3.pt", "val_0.87-epoch-12.pt"),
        ("exp2_9.pt", "exp2_10.pt"),
        ("model_000002.bin", "model_000010.bin"),
        ("epoch=9-step=90.ckpt", "epoch=10-step=100.ckpt"),
    ],
)
def test_numbers_in_names(older, newer):
    """They are compared one after the other, but for those that a word calls a step."""
    assert numbers_of(step_from_name(older)) < numbers_of(step_from_name(newer))


def test_digits_that_count_models_are_parts_only_beside_the_first():
    """``model_1.safetensors`` is Accelerate's second model where the first one lies beside it; else it is a save."""
    assert is_part("model_1.safetensors", {"model.safetensors"})
    assert not is_part("model_1.safetensors", {"model_2.safetensors"})
    assert step_from_name("model_000002.bin", {"model_000004.bin"}) == 2


def test_contents_of_a_fixed_name_are_generations(tmp_path):
    """The newest good content is known-good while it lies there; NaN saved over it is not."""
    for number in (1, 2, 3):
        _save(tmp_path / "ckpt.pt", number, iter_num=number * 100)
        _verify(tmp_path)
        answer = _known_good(tmp_path)
        assert (str(answer.id), answer.step) == (f"-.{number}", None)
    assert str(_known_good(tmp_path, before_step=301).id) == "-.3"
    with pytest.raises(NoKnownGoodError):
        _known_good(tmp_path, before_step=300)
    _save(tmp_path / "ckpt.pt", 4, iter_num=400, nan=True)
    _verify(tmp_path)
    with pytest.raises(NoKnownGoodError):
        _known_good(tmp_path)
    manifest = open_view(str(tmp_path), Settings()).history.manifest(CheckpointId("ckpt.pt", None, 3))
    assert {c.kind: c.value for c in manifest.counters}["iter_num"] == 300


def test_saves_that_look_like_shards_are_saves(tmp_path):
    """``model_000002.bin`` and its like, each one a step."""
    for number in (2, 4, 6):
        _save(tmp_path / f"model_{number:06d}.bin", number)
    _verify(tmp_path)
    assert _known_good(tmp_path).step == 6


@pytest.mark.parametrize(
    ("files", "newest"),
    [
        ({"epoch_3.pt": {"epoch": 3}, "epoch_latest.pt": {"epoch": 4}}, "epoch_latest.pt"),
        ({"last.pt": {"epoch": 9}, "best.pt": {"epoch": 12, "optimizer": False}}, "last.pt"),
        (
            {"checkpoint_1_900.pt": {"num_updates": 900}, "checkpoint_last.pt": {"num_updates": 950}},
            "checkpoint_last.pt",
        ),
        ({"a-7.pt": {}, "b-9.pt": {}}, "b-9.pt"),
    ],
)
def test_the_newest_of_several_series(tmp_path, files, newest):
    """By a counter that all have; what holds no optimizer state comes last."""
    for number, (name, beside) in enumerate(files.items()):
        _save(tmp_path / name, number, **beside)
    _verify(tmp_path)
    answer = _known_good(tmp_path)
    assert answer.path.endswith(newest)
    assert "series" in answer.reason


@pytest.mark.parametrize("order", list(itertools.permutations(("last.pt", "best.pt", "epoch3.pt"))), ids="-".join)
def test_of_equal_saves_it_is_the_one_that_a_resume_reads(tmp_path, monkeypatch, order):
    """One update under three names, sealed in any order: ``last.pt``; without it the number; and ``best.pt`` last."""
    monkeypatch.setattr(seal, "utc_now", map("2026-01-01T00:{:02}:00Z".format, range(60)).__next__)
    for name in order:
        _save(tmp_path / name, 3, epoch=3)
        _verify(tmp_path)
    for name in ("last.pt", "epoch3.pt", "best.pt"):
        view = open_view(str(tmp_path), Settings())
        assert _known_good(tmp_path).path == str(tmp_path / name)
        assert next(known_good_candidates(view, SURE)).manifest.path == name
        assert status(view).known_good.path == str(tmp_path / name)
        (tmp_path / name).unlink()


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
