"""A known-good checkpoint that is damaged by now is no reason to find nothing: older ones may never have been read."""

import pytest
import torch
from support.runs import QUICK
from support.views import look

import ckptguard
from ckptguard.errors import DeniedError
from ckptguard.records.run import open_run
from ckptguard.verification.checkpoint import verify_checkpoint


def test_older_ones_are_verified_when_the_known_good_is_damaged(tmp_path):
    """Only the newest had a verdict, and then it was damaged: a resume and a rollback take the one before."""
    model = torch.nn.Linear(3, 2)
    for name, go in (("resume", lambda guard: guard.resume()), ("rollback", lambda guard: guard.rollback("NaN"))):
        guard = ckptguard.TrainingGuard(tmp_path / name, model=model, daemon="off", settings=QUICK)
        for step in (1, 2, 3):
            guard.save(step=step)
        run = open_run(str(tmp_path / name))
        verify_checkpoint(look(run), look(run).checkpoint("step-000000003"))
        weights = tmp_path / name / "step-000000003" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        assert go(guard) == 2


def test_what_cannot_be_read_is_not_taken_for_nothing_good(tmp_path, monkeypatch):
    """The only known-good checkpoint is there, and reading fails: who resumes is told just that."""
    model = torch.nn.Linear(3, 2)
    guard = ckptguard.TrainingGuard(tmp_path / "run", model=model, daemon="off", settings=QUICK)
    guard.save(step=1)

    def fails(manifest):
        raise DeniedError("the disk says no", key=manifest.path)

    monkeypatch.setattr(guard._store, "read", fails)
    with pytest.raises(DeniedError):
        guard.resume()
