"""After an incident the same updates are made again: what that shows of faults that were put in."""

import os
import random

import pytest
import torch
from support.half_training import Half, batches, taken
from support.replayed_training import KINDS, ONCE, TOTAL, Fault, SameIterator, Struck, allowed, incidents_of

import ckptguard
from ckptguard.errors import RollbackExhausted

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
COUNT = 500 if FULL else 2 * len(KINDS)
REPLAY = ckptguard.RollbackPolicy(first="replay")


def replays(folder):
    """What the replays of a run showed."""
    return [incident.known_details().replay for incident in incidents_of(str(folder))]


@pytest.mark.parametrize("kind", ["nan_batch", "inf_batch", "half"])
def test_a_bad_batch_is_named_and_left_out(tmp_path, kind):
    """It is bad again: the batch is named, and only then left out. The budget counts one incident."""
    struck = Struck(Fault(kind, at=10))
    (incident,) = struck.run(str(tmp_path), policy=ckptguard.RollbackPolicy(first="replay", budget=1))
    replay = incident.known_details().replay
    assert (replay.outcome, replay.began, replay.through, replay.equal) == ("deterministic", 6, 10, 3)
    assert [(b.update, b.epoch, b.index) for b in replay.batches] == [(10, 0, 9)]
    assert replay.tensor is not None
    assert (replay.rank, replay.host) == (None, None)
    assert struck.steps == [*range(1, 11), *range(7, 11), *range(7, TOTAL + 1)]
    assert (incident.state, len(incident.actions)) == ("closed", 2)


@pytest.mark.parametrize("kind", ["weight", "gradient", "optimizer", "buffer", "race"])
def test_what_happened_once_is_a_machine_or_a_race(tmp_path, kind):
    """It is healthy now: the machine is named, the batch is kept, and no update is made more than once more."""
    struck = Struck(Fault(kind, at=10, nan=True))
    policy = ckptguard.RollbackPolicy(first="replay", check_every=1)
    (incident,) = struck.run(str(tmp_path), policy=policy)
    replay = incident.known_details().replay
    assert (replay.outcome, replay.rank, replay.device) == ("not_reproducible", 0, "cpu")
    assert replay.host
    assert sorted(struck.steps) == sorted([*range(1, TOTAL + 1), *range(7, incident.step + 1)])


def test_the_batch_before_the_first_sign_is_named(tmp_path):
    """The gradients of a batch overflow, but its loss is finite, and no norm is reported: the next loss is NaN. A read
    of the tensors in between shows whose batch it was, and only that one is left out."""
    struck = Struck(Fault("half", at=10))
    (incident,) = struck.run(str(tmp_path), told=("loss",))
    assert (incident.step, incident.known_details().onset, incident.known_details().onset_through) == (11, 10, 11)
    replay = incident.known_details().replay
    assert (replay.outcome, [batch.update for batch in replay.batches]) == ("deterministic", [10])
    assert struck.steps == [*range(1, 12), *range(7, 11), *range(7, TOTAL + 1)]


def test_an_equal_first_loss_shows_nothing(tmp_path):
    """It is that of the loaded weights: no update was made before it, whatever noise the gradients have."""
    (incident,) = Struck(Fault("nan_batch", at=8)).run(str(tmp_path), told=("loss",))
    replay = incident.known_details().replay
    assert (replay.outcome, replay.reason) == ("cannot_tell", "no update before the onset could be compared")


def test_a_flipped_weight_is_a_machine(tmp_path):
    """Its NaN shows in the next loss: this rank's numbers differed first, and in the loss."""
    struck = Struck(Fault("weight", at=10, nan=True))
    (incident,) = struck.run(str(tmp_path))
    replay = incident.known_details().replay
    assert (replay.outcome, replay.rank, replay.differs, replay.signal) == ("not_reproducible", 0, 11, "loss")
    shown = {line.step: line for line in replay.updates}
    assert shown[10].loss == shown[10].loss_again
    assert shown[11].loss == "nan"
    assert isinstance(shown[11].loss_again, float)


@pytest.mark.parametrize("kind", ["noise", "noise_and_batch"])
def test_training_that_is_not_deterministic_claims_nothing(tmp_path, kind):
    """The numbers differ from the first update on."""
    (incident,) = Struck(Fault(kind, at=10)).run(str(tmp_path))
    replay = incident.known_details().replay
    assert (replay.outcome, replay.differs, replay.rank, replay.batches) == ("differs", 7, None, ())


def test_a_finite_change_before_the_onset_claims_nothing(tmp_path):
    """A low bit changes the numbers long before training turns sick for another reason."""
    struck = Struck(Fault("weight", at=8, bit=20))

    class Both(Struck):
        def update(self, step, number, x):
            return super().update(step, number, x * float("nan") if number == 10 else x)

    struck.__class__ = Both
    (incident,) = struck.run(str(tmp_path))
    replay = incident.known_details().replay
    assert (replay.outcome, replay.differs) == ("differs", 9)


@pytest.mark.parametrize(
    ("at", "told", "reason"),
    [
        (7, ("loss", "grad_norm"), "no update before the onset could be compared"),
        (10, (), "no update before the onset could be compared"),
    ],
)
def test_without_numbers_from_both_times_nothing_is_told(tmp_path, at, told, reason):
    """The onset right behind the checkpoint, or a loop that reports nothing."""
    (incident,) = Struck(Fault("nan_batch", at=at)).run(str(tmp_path), told=told)
    replay = incident.known_details().replay
    assert (replay.outcome, replay.reason, replay.batches) == ("cannot_tell", reason, ())


def test_what_no_number_shows_is_not_told(tmp_path):
    """A poisoned buffer that only a look finds, twice: nothing shows by which update, so nothing is claimed."""
    model = Half()

    def tell(step, number):
        if number == 4:
            model.seen.fill_(float("nan"))
        return {"loss": 1.0 + step / 7, "grad_norm": 1.0}

    taken(tmp_path / "run", batches(30), 12, tell, model=model, save_every=3, policy=REPLAY)
    replay = replays(tmp_path / "run")[0]
    assert replay.outcome == "cannot_tell"
    assert "nothing shows by which of the updates 4 to 6" in replay.reason


def test_sick_in_another_way_is_not_told(tmp_path):
    """The loss overflows the first time, the gradients the second time."""
    seen = []

    def tell(step, number):
        seen.append(step)
        sick = seen.count(5) if step == 5 else 0
        norm, loss = (float("inf"), 1.5) if sick == 2 else (1.0, 1.0 + step / 7)
        return {"loss": float("nan") if sick == 1 else loss, "grad_norm": norm}

    policy = ckptguard.RollbackPolicy(first="replay", nan_losses=1)
    taken(tmp_path / "run", batches(30), 9, tell, save_every=3, policy=policy)
    (replay,) = replays(tmp_path / "run")
    assert replay.outcome == "cannot_tell"
    assert "sick in another way" in replay.reason


def test_a_loader_that_cannot_go_back(tmp_path):
    """By default batches are skipped at once where the resume turns out not to be exact; if a replay is asked for,
    nothing is told."""
    for first, more in ((None, 1), ("replay", 1)):
        struck = Struck(Fault("race", at=10))
        torch.use_deterministic_algorithms(True)
        try:
            policy = ckptguard.RollbackPolicy(first=first)
            loader = SameIterator(struck.data)
            (incident,) = struck.run(str(tmp_path / str(first)), loader=loader, policy=policy)
        finally:
            torch.use_deterministic_algorithms(False)
        replay = incident.known_details().replay
        assert replay.outcome == "cannot_tell"
        assert "the resume was not exact: iter(loader) returns the same iterator" in replay.reason
        assert incident.state == "closed"
        assert ("skipping" in incident.actions[-1]) == (first is None)
        assert struck.steps.count(10) == 1 + more


@pytest.mark.parametrize(
    ("deterministic", "options", "expected"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"first": "skip"}, False),
        (False, {"first": "replay"}, True),
        (True, {"skip": False}, False),
    ],
)
def test_when_training_replays_first(tmp_path, deterministic, options, expected):
    """The rule, from the policy and from how training computes."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        struck = Struck(Fault("race", at=10))
        (incident,) = struck.run(str(tmp_path), policy=ckptguard.RollbackPolicy(**options))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (incident.known_details().replay is not None) == expected


def test_a_run_whose_replay_was_equal_replays_by_itself(tmp_path):
    """Bit for bit equal once, it is taken for deterministic from then on, also by the next guard."""
    Struck(Fault("nan_batch", at=10)).run(str(tmp_path))
    struck = Struck(Fault("race", at=28))
    found = struck.run(str(tmp_path), total=30, policy=ckptguard.RollbackPolicy())
    assert [i.known_details().replay.outcome for i in found] == ["deterministic", "not_reproducible"]
    noisy = Struck(Fault("noise", at=34))
    noisy.run(str(tmp_path), total=36, policy=REPLAY)
    found = Struck(Fault("race", at=40)).run(str(tmp_path), total=42, policy=ckptguard.RollbackPolicy())
    told = [i.known_details().replay for i in found]
    assert [replay and replay.outcome for replay in told[2:]] == ["differs", None]


def test_the_numbers_of_another_guard_are_none(tmp_path):
    """A guard compares only updates that it has made itself: of those before, the curve holds rounded numbers."""
    Struck(None).run(str(tmp_path), total=9)
    for path in tmp_path.glob("step-*9"):
        path.rename(tmp_path / "elsewhere")
    struck = Struck(Fault("race", at=10))
    (incident,) = struck.run(str(tmp_path))
    assert struck.steps[0] == 7
    assert incident.known_details().replay.equal_since == 7


@pytest.mark.parametrize("how", ["left", "asked", "resumed"])
def test_a_replay_that_does_not_end(tmp_path, how):
    """The incident is closed, and says that nothing was shown."""

    def end(made, guard):
        if made != 12:
            return False
        if how == "asked":
            guard.rollback("by hand")
        if how == "resumed":
            guard.resume()
        return how != "asked"

    found = Struck(Fault("race", at=10)).run(str(tmp_path), end=end)
    first = found[0]
    assert (first.state, first.known_details().replay.outcome) == ("closed", "cannot_tell")
    assert [incident.cause for incident in found[1:]] == (["asked"] if how == "asked" else [])


def test_the_budget_counts_an_incident_once(tmp_path):
    """Three bad batches are three incidents, whatever was made again."""
    struck = Struck(None)
    for number in (2, 9, 16):
        struck.data[number] *= float("nan")
    found = struck.run(str(tmp_path / "three"), policy=ckptguard.RollbackPolicy(first="replay", budget=3, near=0))
    assert [i.known_details().replay.outcome for i in found] == ["deterministic"] * 3
    struck = Struck(None)
    for number in (2, 9, 16):
        struck.data[number] *= float("nan")
    with pytest.raises(RollbackExhausted):
        struck.run(str(tmp_path / "two"), policy=ckptguard.RollbackPolicy(first="replay", budget=2, near=0))


def test_a_cut_rate_is_the_same_in_a_replay(tmp_path):
    """After a repeat the learning rate is cut. A replay of what came after it has the cut rate, too."""
    struck = Struck(None)
    for number in (8, 11, 13):
        struck.data[number] *= float("nan")
    found = struck.run(str(tmp_path), policy=ckptguard.RollbackPolicy(first="replay", budget=9))
    assert [i.known_details().replay.outcome for i in found] == ["deterministic"] * 3
    assert struck.optimizer.param_groups[0]["lr"] == 0.01 / 4


def test_a_policy_that_cannot_be(tmp_path):
    """One of two words."""
    with pytest.raises(ckptguard.CkptguardError, match="must be"):
        ckptguard.RollbackPolicy(first="both")


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(COUNT))
def test_no_diagnosis_is_wrong(tmp_path, seed):
    """Generated faults against what was injected: whatever the replay claims is true."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    fault = Fault(
        kind,
        at=draw.randrange(1, TOTAL + 1),
        bit=draw.choice((30, 30, 29, 28, 27, 23, 31, 12)),
        place=draw.randrange(12),
    )
    struck = Struck(fault, seed)
    policy = ckptguard.RollbackPolicy(
        first="replay",
        check_every=draw.choice((1, 2, 50)),
        spikes=draw.choice((None, ckptguard.Spikes(window=8, warm_up=8, in_a_row=2))),
        nan_losses=draw.choice((1, 3)),
    )
    told = draw.choice((("loss", "grad_norm"), ("loss", "grad_norm"), ("loss",), ("grad_norm",)))
    found = struck.run(str(tmp_path), policy=policy, told=told)
    shown = [incident.known_details().replay for incident in found if incident.cause != "storage"]
    assert len(shown) <= 1 or kind in ONCE
    for replay in shown:
        assert replay is not None
        assert replay.outcome in allowed(fault), (fault, replay)
        assert replay.outcome != "deterministic" or fault.at in [batch.update for batch in replay.batches]
        assert (replay.rank is not None) == (replay.outcome == "not_reproducible")
