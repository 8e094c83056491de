"""Harm that no loss shows: when it began is known as a range, and what is done about it grows with what is known."""

import math

import torch
from support.runs import QUICK
from support.views import look

import ckptguard
from ckptguard.decisions.health import Diagnosis, Health, Limits, Signal
from ckptguard.decisions.rollback_policy import RollbackPolicy, decide
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.reporting.build_report import report_of
from ckptguard.reporting.report_html import report_html
from ckptguard.reporting.report_text import report_text
from ckptguard.training.ranks import agree
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

LOOK, BAD = {"looked": True}, {"looked": True, "bad_tensor": "w"}


def diagnose(*signals):
    """The diagnosis after some (step, fields)."""
    health, found = Health(), None
    for step, fields in signals:
        health, found = health.after(Signal(step=step, **fields), Limits())
    return found


def test_finite_losses_do_not_vouch_for_what_they_do_not_depend_on():
    """The onset lies anywhere after the last clean look, up to what the losses tell."""
    losses = [(step, {"loss": 1.0}) for step in range(1, 11)]
    found = diagnose(*losses[:4], (4, LOOK), *losses[4:], (10, BAD))
    assert (found.onset_step, found.onset_through, found.surely_by, found.step) == (5, 10, 10, 10)
    assert found.evidence["looked_through"] == 4
    assert "every tensor was finite after step 4" in found.reason


def test_the_first_nan_loss_is_the_first_sign():
    """Its weights came from the update before it, whose own loss was finite: that one is skipped only on a repeat."""
    losses = [(step, {"loss": 1.0}) for step in range(1, 10)]
    found = diagnose((0, LOOK), *losses, (10, {"loss": math.nan, **BAD}))
    assert (found.onset_step, found.onset_through, found.surely_by) == (9, 10, 10)


def test_a_look_that_arrives_late_is_judged_under_its_own_step():
    """Losses of later updates came first; they do not move what the look says."""
    losses = [(step, {"loss": 1.0}) for step in range(1, 21)]
    found = diagnose((5, LOOK), *losses, (10, BAD))
    assert (found.onset_step, found.onset_through, found.step) == (6, 10, 10)


def test_without_any_loss_every_update_since_the_look_is_under_suspicion():
    """As ever: there is nothing that vouches for some of them."""
    found = diagnose((5, LOOK), (10, BAD))
    assert (found.onset_step, found.onset_through) == (6, None)


def test_after_a_rollback_the_loaded_state_is_the_last_clean_look():
    """It was verified."""
    health, found = Health().restarted(40).after(Signal(step=50, loss=1.0, looked=True, bad_tensor="w"), Limits())
    assert health.looked_through == 40
    assert (found.onset_step, found.onset_through) == (41, 50)


def test_only_a_repeat_is_worth_the_whole_range():
    """First around what is certain; near the last one, everything since the clean look, and further back."""
    asked = {"cause": "weights", "onset_step": 50, "possibly_since": 41, "last": 50, "save_every": 10}
    first = decide(RollbackPolicy(), [], **asked)
    assert (first.onset_step, first.before_step, first.further) == (50, 50, 0)
    again = decide(RollbackPolicy(), [50], **asked)
    assert (again.onset_step, again.before_step, again.further) == (41, 41, 1)
    assert "skipping the batches of updates 41 to 50" in again.reason
    far = decide(RollbackPolicy(), [500], **asked)
    assert far.onset_step == 50
    replayed = decide(RollbackPolicy(skip=False), [50], **asked)
    assert "replaying" in replayed.reason


def test_the_rank_that_knows_more_speaks_for_all():
    """A range that merely begins earlier does not outdo a rank that knows the update."""

    class Two:
        rank, size = 0, 2

        def any(self, mine):
            return True

        def gather(self, mine):
            return [mine, {"step": 48, "cause": "grad_norm", "onset_step": 48, "reason": "it is nan"}]

    own = Diagnosis(step=50, cause="weights", onset_step=1, onset_through=50, reason="w")
    found = agree(Two(), own)
    assert (found.cause, found.onset_step, found.onset_through) == ("grad_norm", 48, None)


class Counting(torch.nn.Module):
    """A buffer sums what no loss depends on: a hot batch makes it infinite, and nothing else shows that."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(4, 1))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen = self.seen + x.mean(0) * x.mean(0).abs().exp()
        return (x.clamp(-1, 1) @ self.weight).square().mean()


def train(run, hot, *, total=24, **options):
    """Train on batches of which number `hot` does the harm; (model, the batches that each update saw, at the end)."""
    generator = torch.Generator().manual_seed(5)
    data = [(n, torch.randn(4, 4, generator=generator) * (900.0 if n == hot else 1.0)) for n in range(total + 20)]
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = {}
    with ckptguard.TrainingGuard(
        str(run), model=model, optimizer=optimizer, daemon="off", settings=QUICK, **options
    ) as guard:
        for step, (number, x) in guard.steps(data, total=total, save_every=12):
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            guard.observe(loss=loss)
            seen[step] = number
    return model, seen


def test_a_hidden_poison_is_left_behind_on_the_second_try(tmp_path):
    """At first only the batch at which it was seen is skipped; on its return, all since the last clean read."""
    model, seen = train(tmp_path, hot=14, policy=ckptguard.RollbackPolicy(check_every=6))
    assert torch.isfinite(model.seen).all()
    assert 14 not in seen.values()
    run = open_run(str(tmp_path))
    first, second = list_incidents(run)
    for incident in (first, second):
        details = incident.known_details()
        assert (details.onset, details.onset_through) == (13, 18)
    assert "skipping the batch of update 18" in first.actions[-1]
    assert "skipping the batches of updates 13 to 18" in second.actions[-1]
    # The repeat goes back to the start: updates 1 to 12 are made again, and the draws 12 to 18 are left out.
    assert [number for _, number in sorted(seen.items())] == [*range(12), *range(19, 31)]
    text, page = (form(report_of(look(run), first)) for form in (report_text, report_html))
    assert "onset:     between 13 and 18\n" in text
    assert "noticed:   step 18, at most 5 updates later, by the training guard\n" in text
    assert "between 13 and 18" in page
    assert 'class="span"' in page
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD


def onset_of(*signals):
    """(first update under suspicion, update by which the harm was surely done) of the sickness that signals end in."""
    health, limits, found = Health(), Limits(), None
    for signal in signals:
        health, found = health.after(signal, limits)
    assert found.sick
    return found.onset_step, found.surely_by


def accumulated(*, losses, norm_every, last_norm):
    """Updates that only every so often use their gradients, and tell their norm then."""
    for step, loss in enumerate(losses, start=1):
        norm = None if step % norm_every else 1.0
        yield Signal(step=step, loss=loss, grad_norm=last_norm if step == len(losses) else norm)
        if not math.isfinite(loss):
            yield Signal(step=step, looked=True, loss=loss)


def test_a_nan_loss_may_wait_in_accumulated_gradients():
    """Finite losses and finite weights after it vouch for nothing until the gradients are used."""
    losses = [1.0] * 5 + [math.nan, 1.0, 1.0]
    assert onset_of(*accumulated(losses=losses, norm_every=4, last_norm=math.nan)) == (6, 6)
    told = list(accumulated(losses=losses, norm_every=4, last_norm=None))
    assert onset_of(*told, Signal(step=8, looked=True, bad_tensor="w")) == (6, 8)


def test_an_overflow_may_wait_in_accumulated_gradients():
    """Where no loss shows it, what went into the norm is in question: at first its last batch, then all of them."""
    assert onset_of(*accumulated(losses=[1.0] * 8, norm_every=4, last_norm=math.inf)) == (5, 8)
    assert onset_of(*accumulated(losses=[1.0] * 8, norm_every=1, last_norm=math.inf)) == (8, 8)


def test_a_masked_batch_of_before_is_not_held_against_later_updates():
    """A finite norm, or a look that was clean, settles it."""
    losses = [1.0, math.nan, 1.0, 1.0, 1.0, 1.0]
    assert onset_of(*accumulated(losses=losses, norm_every=4, last_norm=math.nan)) == (5, 6)
    signals = list(accumulated(losses=losses[:5], norm_every=9, last_norm=None))
    signals += [Signal(step=5, looked=True), Signal(step=6, loss=1.0), Signal(step=6, looked=True, bad_tensor="w")]
    assert onset_of(*signals) == (6, 6)
