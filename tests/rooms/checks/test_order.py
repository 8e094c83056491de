"""Counters inside checkpoints, and names that contradict them."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.run_view import open_view
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.checkpoint import verify_checkpoint

_SCHEDULES = {"config": {"step": 7}, "args": {"iteration": 8}, "hyper_parameters": {"global_step": 9}}


def _sealed(run, name):
    """Verify one checkpoint of a run; its manifest, and what was found."""
    view = open_view(str(run), Settings())
    checked = verify_checkpoint(view, view.checkpoint(name))
    assert checked.outcome is Outcome.GOOD
    return view.history.manifest(checked.id), checked.findings


def _state(**beside):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(1, 3)).sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **beside}


@pytest.mark.parametrize(
    ("beside", "kinds"),
    [
        ({}, {"optimizer step": 4}),
        ({"iter_num": 3500, **_SCHEDULES}, {"iter_num": 3500, "optimizer step": 4}),
        ({"epoch": 3, "global_step": 12}, {"global_step": 12, "optimizer step": 4, "epoch": 3}),
        ({"epoch": -1}, {"optimizer step": 4}),
        ({"epoch": True, "step": 2.5, "iteration": float("inf")}, {"optimizer step": 4}),
        ({"extra": {"epoch": 9}, "epoch": 2}, {"optimizer step": 4, "epoch": 2}),
        ({"history": [{"num_updates": 100}, {"num_updates": 200}]}, {"num_updates": 200, "optimizer step": 4}),
    ],
)
def test_what_counts(tmp_path, beside, kinds):
    """The outermost counter of a kind, and of equally deep ones the highest; nothing that a user set."""
    torch.save(_state(**beside), tmp_path / "ckpt.pt")
    if beside.get("iteration"):
        beside.pop("iteration")  # a number that is not finite has its own finding
        torch.save(_state(**beside), tmp_path / "ckpt.pt")
    manifest, _ = _sealed(tmp_path, "ckpt.pt")
    assert {c.kind: c.value for c in manifest.counters} == kinds
    assert all(c.source.startswith("ckpt.pt: ") for c in manifest.counters)
    assert manifest.training_step == next((v for k, v in kinds.items() if k != "epoch"), None)


def test_a_counter_in_json(tmp_path):
    """Beside weights: Hugging Face's ``trainer_state.json``."""
    folder = tmp_path / "checkpoint-40"
    folder.mkdir()
    torch.save(torch.nn.Linear(3, 2).state_dict(), folder / "pytorch_model.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 40, "epoch": 2.0, "log_history": []}))
    manifest, _ = _sealed(tmp_path, "checkpoint-40")
    assert {c.kind: c.value for c in manifest.counters} == {"global_step": 40, "epoch": 2}


def test_a_name_that_contradicts_its_counter_is_warned_of(tmp_path):
    """The numbers of ``acc_91_500`` and ``acc_87_1000`` are no order: the warning says what to do."""
    torch.save(_state(global_step=1000), tmp_path / "acc_87_1000.pt")
    torch.save(_state(global_step=500), tmp_path / "acc_91_500.pt")
    assert not [f for f in _sealed(tmp_path, "acc_87_1000.pt")[1] if f.check == "order"]
    [found] = [f for f in _sealed(tmp_path, "acc_91_500.pt")[1] if f.check == "order"]
    assert "acc_87_1000.pt" in found.message
    assert "pattern" in found.message


@settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    first=st.dates(datetime.date(2023, 1, 1), datetime.date(2025, 1, 1)),
    gaps=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    name=st.sampled_from(["model_%d-%m-%Y.pt", "model_%m-%d-%Y.pt", "model_%Y-%m-%d.pt", "net_%j.pt"]),
    counted=st.booleans(),
    together=st.booleans(),
)
def test_no_series_is_out_of_order_in_silence(first, gaps, name, counted, together):
    """Whatever names are made of: known-good is the one that was saved last, or a warning says what to set. Judged one
    by one as they are saved, or, where counters tell, all at once."""
    days = [first + datetime.timedelta(days=n) for n in itertools.accumulate([0, *gaps])]
    with tempfile.TemporaryDirectory() as folder:
        warned, newest = [], None
        for number, day in enumerate(days):
            newest = Path(folder, day.strftime(name))
            state = _state(iter_num=number) if counted else {"w": torch.full((3, 3), number + 1.5)}
            torch.save(state, newest)
            os.utime(newest, ns=((10**9 + number) * 10**9,) * 2)
            if together and counted and day != days[-1]:
                continue
            done = reconcile(open_view(folder, Settings()), PassNotes(), assume_quiet=True)
            warned += [f for one in done.checked for f in one.findings if f.check == "order"]
        rising = [day.strftime(name) for day in days]
        known_good = find_known_good(open_view(folder, Settings()).run).path
        several = "-" in name
        if known_good != str(newest) and (counted or several):
            assert warned
        assert all("ckptguard.toml" in f.message and f.severity is Severity.WARNING for f in warned)
        if rising == sorted(rising):
            assert (known_good, warned) == (str(newest), [])
