"""One checkpoint that cannot be read, or goes away, while a run is replicated: the others arrive."""

import os

import pytest
from support.runs import QUICK
from support.views import look

from ckptguard.errors import DeniedError
from ckptguard.replicas import replicate as module
from ckptguard.replicas.replicate import replicate
from ckptguard.retention.prune import prune
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.retention_policy import Policy


@pytest.fixture
def good(three):
    """A run whose three checkpoints are good, without kept copies."""
    reconcile(look(three, QUICK.changed(keep="none")), PassNotes())
    return three


@pytest.mark.parametrize("step", [100, 300])
def test_one_that_cannot_be_read_does_not_hold_up_the_others(good, tmp_path, monkeypatch, step):
    """It has failed, by its own name, and is behind by nothing else."""
    stat = type(good.storage).stat

    def denied(self, key):
        if key == f"net-{step}.pt" and self.url == good.url:
            raise DeniedError(f"{key}: permission denied", key=key)
        return stat(self, key)

    monkeypatch.setattr(type(good.storage), "stat", denied)
    done = replicate(look(good), str(tmp_path / "there"))
    others = [s for s in (300, 200, 100) if s != step]
    expected = [(f"{s}.1", "failed" if s == step else "sent") for s in (300, 200, 100)]
    assert [(str(c.id), c.done) for c in done.checkpoints] == expected
    [failed] = [c for c in done.checkpoints if c.done == "failed"]
    assert "permission denied" in failed.message
    assert failed.path == f"net-{step}.pt"
    assert str(done.last_good) == f"{others[0]}.1"


@pytest.mark.parametrize("by", ["prune", "the trainer"])
def test_what_is_removed_meanwhile_is_gone(root, good, tmp_path, monkeypatch, by):
    """It is no failure, and the replica is not behind because of it."""
    send = module.send_checkpoint

    def removes_another(view, target, candidate, *rest, **more):
        if candidate.id.step == 200:  # which is in use now, and stays
            if by == "prune":
                removed = prune(look(view.run), Policy(keep_last=1, keep_good=1), grace=0.0).removed
                assert [d.checkpoint.path for d in removed] == ["net-100.pt"]
            else:
                os.unlink(root / "net-100.pt")
        return send(view, target, candidate, *rest, **more)

    monkeypatch.setattr(module, "send_checkpoint", removes_another)
    done = replicate(look(good), str(tmp_path / "there"))
    assert [(str(c.id), c.done) for c in done.checkpoints] == [("300.1", "sent"), ("200.1", "sent"), ("100.1", "gone")]
    assert (done.behind, done.trouble) == (0, None)
