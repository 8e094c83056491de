"""What a guard loads: pinned while it is loaded, and not a moment longer; an older one where the newest is damaged."""

import pytest
import torch
from support.faults import flip
from support.guards import guard_of
from support.views import look

from ckptguard.errors import DeniedError, StorageFullError
from ckptguard.records.pins import list_pins
from ckptguard.records.run import open_run
from ckptguard.training.saving.stores import OwnStore
from ckptguard.verification.checkpoint import verify_checkpoint


class Broken(Exception):
    """What the user's own load may raise."""


def watched(monkeypatch, run):
    """The pins that there are whenever our own layout is read."""
    seen, real = [], OwnStore.read

    def read(store, manifest):
        seen.append([(p.step, p.generation, p.reason, p.note) for p in list_pins(open_run(str(run)))])
        return real(store, manifest)

    monkeypatch.setattr(OwnStore, "read", read)
    return seen


def test_a_resume_and_a_rollback_pin_what_they_load(tmp_path, monkeypatch):
    """One pin each while the tensors are read, none afterwards."""
    run, model = tmp_path / "run", torch.nn.Linear(3, 2)
    guard = guard_of(run, model)
    guard.save(step=1)
    guard.save(step=2)
    seen = watched(monkeypatch, run)
    assert guard.resume() == 2
    assert guard.rollback("asked") == 2
    assert seen == [[(2, 1, "in use", "a resume")], [(2, 1, "in use", "a rollback")]]
    assert list_pins(open_run(str(run))) == []


def test_a_load_that_fails_leaves_no_pin(tmp_path):
    """The user's own load raises: so does the guard, and nothing stays pinned."""
    run, model, seen = tmp_path / "run", torch.nn.Linear(3, 2), []

    def load(path):
        seen.append([p.step for p in list_pins(open_run(str(run)))])
        raise Broken

    guard = guard_of(run, model, save=lambda path, step: torch.save(model.state_dict(), path), load=load)
    guard.save(step=1)
    with pytest.raises(Broken):
        guard.resume()
    with pytest.raises(Broken):
        guard.rollback("asked")
    assert seen == [[1], [1]]
    assert list_pins(open_run(str(run))) == []


def test_a_pin_that_cannot_be_written_stops_no_training(tmp_path, monkeypatch, caplog):
    """It is said, and the checkpoint is loaded."""
    run, model = tmp_path / "run", torch.nn.Linear(3, 2)
    guard = guard_of(run, model)
    guard.save(step=1)
    records = type(open_run(str(run)).records)
    real = records.create

    def create(storage, key, data):
        if key.startswith("pins/"):
            raise StorageFullError("no space left for a pin", key=key)
        real(storage, key, data)

    monkeypatch.setattr(records, "create", create)
    assert guard.resume() == 1
    assert guard.rollback("asked") == 1
    assert caplog.text.count("could not be pinned") == 2


def test_older_ones_are_verified_when_the_known_good_is_damaged(tmp_path):
    """Only the newest had a verdict, and then it was damaged: a resume and a rollback take the one before."""
    model = torch.nn.Linear(3, 2)
    for name, go in (("resume", lambda guard: guard.resume()), ("rollback", lambda guard: guard.rollback("NaN"))):
        guard = guard_of(tmp_path / name, model)
        for step in (1, 2, 3):
            guard.save(step=step)
        run = open_run(str(tmp_path / name))
        verify_checkpoint(look(run), look(run).checkpoint("step-000000003"))
        flip(tmp_path / name / "step-000000003" / "model.safetensors", -1, new_times=True)
        assert go(guard) == 2


def test_what_cannot_be_read_is_not_taken_for_nothing_good(tmp_path, monkeypatch):
    """The only known-good checkpoint is there, and reading fails: who resumes is told just that."""
    model = torch.nn.Linear(3, 2)
    guard = guard_of(tmp_path / "run", model)
    guard.save(step=1)

    def fails(manifest):
        raise DeniedError("the disk says no", key=manifest.path)

    monkeypatch.setattr(guard._store, "read", fails)
    with pytest.raises(DeniedError):
        guard.resume()
