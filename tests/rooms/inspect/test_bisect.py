"""bisect: when did a run turn bad, and what went first?"""

import shutil

import pytest
import torch
from support.faults import flip
from support.runs import QUICK, state_dict, write_torch
from support.views import look

from ckptguard.errors import NotFoundError, SettingsError
from ckptguard.inspect.bisect import bisect_run
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs.history import load_history
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target


def save_sick(root, step, *, series="net", seed=None, **where):
    """Save a state whose named tensors hold NaN at the given flat index."""
    state = state_dict(seed or step)
    for name, index in where.items():
        state[name.replace("__", ".")].view(-1)[index] = float("nan")
    torch.save(state, root / f"{series}-{step}.pt")


@pytest.fixture
def turned(root, three):
    """Steps 100 to 300 are fine, from 400 on two tensors are sick and the last is whole again in one of them."""
    save_sick(root, 400, layers__2__norm__bias=5, embed__weight=100)
    save_sick(root, 500, layers__0__norm__bias=0, embed__weight=0)
    return three


def test_the_last_good_is_held_against_the_first_bad(turned):
    """Unverified checkpoints are verified and recorded; what is sick is listed in file order, with count and index."""
    found = bisect_run(look(turned))
    assert (found.series, str(found.last_good.id), str(found.first_bad.id)) == ("net-#.pt", "300.1", "400.1")
    assert [s.outcome.value for s in found.stages] == ["good", "good", "good", "bad", "bad"]
    assert [(c.tensor, c.nan, c.inf, c.first_index) for c in found.culprits] == [
        ("layers.2.norm.bias", 1, 0, 5),
        ("embed.weight", 1, 0, 100),
    ]
    assert [c.name for c in found.diff.changes[:2]] == ["layers.2.norm.bias", "embed.weight"]
    assert found.diff.changes[1].difference.first_nonfinite == (2, 4)
    assert (str(found.diff.a.id), str(found.diff.b.id)) == ("300.1", "400.1")
    assert len(load_history(turned).names["net-#.pt"]) == 5


def test_nothing_is_recorded_if_not_wanted(turned):
    """Without recording the answer is the same, and the ledger stays empty."""
    found = bisect_run(look(turned), record=False)
    assert (found.last_good.step, found.first_bad.step) == (300, 400)
    assert [c.tensor for c in found.culprits] == ["layers.2.norm.bias", "embed.weight"]
    assert found.findings
    assert load_history(turned).names == {}


def test_damage_is_named_before_what_training_changed(root, three):
    """A flipped byte in a sealed checkpoint: its tensor is the culprit, however much training changed the others."""
    verify_target(str(root), QUICK)
    flip(root / "net-200.pt")
    verify_target(str(root), QUICK)
    found = bisect_run(look(three))
    assert (found.last_good.step, found.first_bad.step) == (100, 200)
    assert {c.check for c in found.culprits} <= {"digests", "structure", "finite"}
    [damaged] = [c.tensor for c in found.culprits if c.check == "digests"]
    assert damaged in state_dict(1)


def test_all_good_has_nothing_to_say(three):
    """No bad one: no pair, and the stages tell it."""
    found = bisect_run(look(three))
    assert (found.last_good, found.first_bad, found.diff) == (None, None, None)
    assert {s.outcome for s in found.stages} == {Outcome.GOOD}


def test_nothing_good_before_it(run, root):
    """The first bad one of all is described alone."""
    save_sick(root, 100, embed__weight=0)
    save_sick(root, 200, embed__weight=0)
    found = bisect_run(look(run))
    assert (found.last_good, found.first_bad.step, found.diff) == (None, 100, None)
    assert [c.tensor for c in found.culprits] == ["embed.weight"]
    assert "no good checkpoint" in found.notes[0]


def test_after_a_rollback_the_quarantined_one_is_compared(turned):
    """What was moved to quarantine is read there."""
    verify_target(turned.url, QUICK)
    roll_back(look(turned), GoBack(reason="it turned sick"))
    found = bisect_run(look(turned))
    assert str(found.first_bad.id) == "400.1"
    assert [c.tensor for c in found.culprits] == ["layers.2.norm.bias", "embed.weight"]
    assert "quarantine" in found.diff.b.path


def test_a_good_one_that_was_rotated_away_is_read_from_its_copy(turned, root):
    """The trainer deleted the last good one: the kept copy stands for it."""
    reconcile(look(turned, QUICK.changed(keep="copy")), PassNotes())
    (root / "net-300.pt").unlink()
    found = bisect_run(look(turned))
    assert (str(found.last_good.id), str(found.diff.a.id)) == ("300.1", "300.1")
    assert "kept" in found.diff.a.path


def test_an_older_good_one_stands_in_for_one_that_is_gone(turned, root):
    """Without a copy the newest good one that is still there is compared, and says which it is."""
    verify_target(turned.url, QUICK)
    (root / "net-300.pt").unlink()
    found = bisect_run(look(turned))
    assert (str(found.last_good.id), str(found.diff.a.id)) == ("300.1", "200.1")


def test_a_bad_one_that_is_gone_leaves_its_findings(turned, root):
    """Only the verdict is left: it still names the tensors."""
    verify_target(turned.url, QUICK)
    for step in (400, 500):
        (root / f"net-{step}.pt").unlink()
    found = bisect_run(look(turned))
    assert (str(found.first_bad.id), found.diff) == ("400.1", None)
    assert {c.tensor for c in found.culprits} == {"layers.2.norm.bias", "embed.weight"}
    assert "is gone" in found.notes[0]


def test_what_cannot_be_compared_is_a_note(three, root):
    """A bad one whose structure is gone has findings, no diff, and a reason."""
    write_torch(root, 400, 4)
    verify_target(str(root), QUICK)
    (root / "net-400.pt").write_bytes(b"\0" * (root / "net-400.pt").stat().st_size)
    verify_target(str(root), QUICK)
    found = bisect_run(look(three))
    assert (found.last_good.step, found.first_bad.step, found.diff) == (300, 400, None)
    assert found.culprits
    assert "cannot be compared" in found.notes[0]


def test_series_are_told_apart(turned, root):
    """Two series that turned bad need a choice; one that is named is looked at alone."""
    write_torch(root, 100, 1)
    shutil.copy(root / "net-100.pt", root / "ema-100.pt")
    save_sick(root, 200, series="ema", embed__weight=0)
    with pytest.raises(SettingsError, match="several series"):
        bisect_run(look(turned))
    found = bisect_run(look(turned), series="ema-#.pt")
    assert (found.last_good.path, found.first_bad.path) == ("ema-100.pt", "ema-200.pt")
    with pytest.raises(NotFoundError):
        bisect_run(look(turned), series="none-#.pt")


def test_the_newest_turn_counts(run, root):
    """Bad, good, bad again: the turn that matters is the last one."""
    for step in (100, 300):
        write_torch(root, step, step)
    for step in (200, 400, 500):
        save_sick(root, step, embed__weight=0)
    found = bisect_run(look(run))
    assert (found.last_good.step, found.first_bad.step) == (300, 400)


def test_more_sick_tensors_than_a_verdict_lists(run, root):
    """Verdicts list fifty findings; the culprits are all of them."""
    for step, value in ((1, 0.5), (2, float("nan"))):
        torch.save({f"w.{i:03d}": torch.tensor([[1.0, value + i]]) for i in range(70)}, root / f"net-{step}.pt")
    found = bisect_run(look(run))
    assert [c.tensor for c in found.culprits] == [f"w.{i:03d}" for i in range(70)]
