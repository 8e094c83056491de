"""A resume that is checked first: a small batch decides, leaves no trace, and what is missing is said."""

import copy
import math

import pytest
import torch
from safetensors.torch import save_file
from support.faults import flip
from support.guards import guarded as guard_of
from support.runs import QUICK
from support.tiny_training import Training, assert_same
from support.views import look

import ckptguard
from ckptguard.errors import CouldNotTellError, NoKnownGoodError, NotFoundError, RefusedError, SettingsError, StateError
from ckptguard.inspect.list_states import survey
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Outcome


def guarded(run, training, **options):
    """A guard over a training, some of whose parts may be left out."""
    return guard_of(run, **{**training.parts(), **options})


def train(run, total, *, probe=None, training=None, save_every=2):
    """Train to a step; returns (training, steps made)."""
    training = training or Training()
    steps = []
    with guarded(run, training) as guard:
        if probe is not None:
            guard.resume(probe=lambda: probe(training))
        for step, batch in guard.steps(training.loader, total=total, save_every=save_every):
            loss, norm = training.update(step, batch)
            guard.observe(loss=loss, grad_norm=norm)
            steps.append(step)
    return training, steps


def small_batch(training):
    """A probe that uses dropout, batch norm and every generator."""
    training.model.train()
    x = torch.randn(8, 8)
    return torch.nn.functional.mse_loss(training.model(x), x[:, :1])


def test_a_probe_leaves_no_trace(tmp_path):
    """A training that was resumed with a probe is bit for bit the one that was resumed without."""
    for name in ("with", "without"):
        train(tmp_path / name, 5)
    probed, one = train(tmp_path / "with", 9, probe=small_batch)
    plain, other = train(tmp_path / "without", 9)
    assert one == other == [6, 7, 8, 9]
    assert_same(probed, plain)


def test_a_probe_puts_everything_back(tmp_path):
    """Gradients, buffers, modes and generators are those from before, also when the probe raises."""
    train(tmp_path / "run", 3)
    training = Training()
    with guarded(tmp_path / "run", training) as guard:
        guard.resume()
        first = next(training.model.parameters())
        first.grad = torch.ones_like(first)
        gradient = first.grad
        training.model.eval()
        before = {n: t.clone() for n, t in training.model.state_dict().items()}
        rng = torch.get_rng_state()

        def raises():
            small_batch(training).backward()
            raise ValueError("of my own")

        from ckptguard.training.rollback.load_known_good import sick_because

        with pytest.raises(ValueError, match="of my own"):
            sick_because(training.model, raises)
        assert sick_because(training.model, lambda: small_batch(training)) is None
    assert first.grad is gradient
    assert torch.equal(gradient, torch.ones_like(first))
    assert not training.model.training
    assert torch.equal(torch.get_rng_state(), rng)
    after = training.model.state_dict()
    assert [n for n in before if not torch.equal(before[n], after[n])] == []


def refuse_after(step):
    """A probe that is sick with every state after a step: its batch norm has counted more batches than that."""

    def probe(training):
        loss = small_batch(training)
        return loss * (math.nan if training.model[1].num_batches_tracked > step + 1 else 1.0)

    return probe


def test_what_the_probe_refuses_is_passed_over(tmp_path):
    """The next older checkpoint with a finite probe is taken; what was refused is sick, and put aside as suspect."""
    train(tmp_path / "run", 8)
    _, steps = train(tmp_path / "run", 9, probe=refuse_after(4))
    assert steps == [5, 6, 7, 8, 9]
    run = open_run(str(tmp_path / "run"))
    refused = {str(s.id): s.outcome for s in survey(look(run)) if s.quarantined}
    assert refused == {"6.1": Outcome.SUSPECT, "8.1": Outcome.SUSPECT}
    assert {i.cause for i in list_incidents(run)} == {"probe"}


def test_a_probe_that_refuses_all_moves_nothing(tmp_path):
    """Then the probe itself may be at fault: one clear error, and every checkpoint stays as it was."""
    train(tmp_path / "run", 6)
    training = Training()
    with guarded(tmp_path / "run", training) as guard, pytest.raises(NoKnownGoodError, match="passes the probe"):
        guard.resume(probe=lambda: math.inf)
    states = survey(look(str(tmp_path / "run")))
    assert {s.outcome for s in states} == {Outcome.GOOD}
    assert not any(s.quarantined for s in states)


def test_gradients_decide_too(tmp_path):
    """A finite loss with a gradient that is not finite is refused, and so is an error that speaks of NaN."""
    train(tmp_path / "run", 2)
    training = Training()

    def infinite_gradient():
        return (training.model[0].weight * 0.0).sqrt().sum()

    def sampling():
        return torch.multinomial(torch.tensor([math.nan, 1.0]), 1)

    for probe, why in ((infinite_gradient, "gradient of 0.weight"), (sampling, "probability tensor")):
        with guarded(tmp_path / "run", training) as guard, pytest.raises(NoKnownGoodError, match=why):
            guard.resume(probe=probe)


def test_a_probe_must_be_one(tmp_path):
    """It must compute something, and must not train."""
    train(tmp_path / "run", 2)
    training = Training()
    with guarded(tmp_path / "run", training) as guard:
        with pytest.raises(SettingsError, match="neither a loss nor gradients"):
            guard.resume(probe=lambda: None)

        def trains():
            small_batch(training).backward()
            training.optimizer.step()

        with pytest.raises(StateError, match="the probe changed"):
            guard.resume(probe=trains)


def test_a_first_start_needs_no_probe(tmp_path):
    """Where nothing was saved there is nothing to check."""
    training = Training()
    with guarded(tmp_path / "run", training) as guard:
        assert guard.resume(probe=lambda: pytest.fail("called")) == 0
        assert guard.missing_for_exact_resume == ()


def test_what_is_missing_for_an_exact_resume(tmp_path):
    """The same parts: nothing. Fewer parts, or a save outside of the loop: each is named."""
    train(tmp_path / "run", 2)
    with guarded(tmp_path / "run", Training()) as guard:
        guard.resume()
        assert guard.missing_for_exact_resume == ()
    with guarded(tmp_path / "run", Training(), scheduler=None) as guard:
        guard.resume()
        assert guard.missing_for_exact_resume == ("the checkpoint holds a scheduler, but the guard was given none",)
    with guarded(tmp_path / "other", Training()) as guard:
        guard.save(step=9)
        guard.resume()
        assert guard.missing_for_exact_resume == ("the checkpoint does not hold the position in the data",)


def test_names_that_do_not_fit(tmp_path):
    """Strict by default; without, what fits is loaded and the rest is warned about."""
    trained, _ = train(tmp_path / "run", 2)
    other = Training()
    other.model.append(torch.nn.Linear(1, 1))
    guard = guarded(tmp_path / "run", other, optimizer=None, scheduler=None)
    with guard, pytest.raises(StateError, match="2 missing, 0 unexpected"):
        guard.resume()
    del other.model[5]
    narrow = torch.nn.Sequential(torch.nn.Linear(3, 16), *other.model[1:])
    with guard_of(tmp_path / "run", narrow) as guard, pytest.raises(StateError, match=r"0\.weight was saved as"):
        guard.resume()
    other.model.append(torch.nn.Linear(1, 1))
    kept = copy.deepcopy(other.model[5].weight)
    with guarded(tmp_path / "run", other, optimizer=None, scheduler=None, strict=False) as guard:
        assert guard.resume() == 2
        lacks = "5.bias, 5.weight of the model are not in the checkpoint"
        assert lacks in guard.missing_for_exact_resume
    assert torch.equal(other.model[0].weight, trained.model[0].weight)
    assert torch.equal(other.model[5].weight, kept)


def test_an_incident_says_which_names_did_not_fit(tmp_path):
    """Missing and unexpected ones, in the record and among the likely causes; the next good resume forgets them."""
    trained, _ = train(tmp_path / "run", 2)
    other = Training()
    other.model.append(torch.nn.Linear(1, 1))
    del other.model[1]  # the batch norm: the last layers' names move
    other.model.insert(1, torch.nn.Identity())
    with guarded(tmp_path / "run", other, optimizer=None, scheduler=None, strict=False) as guard:
        for step, batch in guard.steps(other.loader, total=4, save_every=2):
            loss = other.model(batch[0]).mean()
            guard.observe(loss=loss, grad_norm=math.nan if step == 3 and not steps_made(tmp_path) else 1.0)
    [incident] = [i for i in list_incidents(open_run(str(tmp_path / "run"))) if i.cause == "grad_norm"]
    details = incident.known_details()
    assert details.resumed.missing == ("5.bias", "5.weight")
    assert set(details.resumed.unexpected) == {f"1.{name}" for name in trained.model[1].state_dict()}
    assert "keys_do_not_match" in [cause.name for cause in details.causes]


def steps_made(folder):
    """Whether an incident of the training was recorded already."""
    return any(i.cause == "grad_norm" for i in list_incidents(open_run(str(folder / "run"))))


def test_a_part_that_was_not_saved(tmp_path):
    """An optimizer whose state is not in the checkpoint is refused, or starts from scratch where that is allowed."""
    with guarded(tmp_path / "run", Training(), optimizer=None, scheduler=None) as guard:
        guard.save(step=1)
    with guarded(tmp_path / "run", Training(), scheduler=None) as guard, pytest.raises(StateError, match="optimizer"):
        guard.resume()
    with guarded(tmp_path / "run", Training(), scheduler=None, strict=False) as guard:
        assert guard.resume() == 1
        assert "the checkpoint holds no state of the optimizer" in guard.missing_for_exact_resume


def test_pretrained_weights_are_checked(tmp_path):
    """GOOD returns the report; NaN, damage against its sums, and nothing there are each one clear error."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(8, 8)}, path)
    (report,) = ckptguard.check_pretrained(path, settings=QUICK).checkpoints
    assert report.outcome is Outcome.GOOD
    import hashlib

    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  model.safetensors\n")
    ckptguard.check_pretrained(path, sums=sums, settings=QUICK)
    flip(path, -3, new_times=True)  # a loader does not notice, and the numbers stay finite
    for given in (None, sums):  # the list beside the file is used by itself
        with pytest.raises(RefusedError, match="is bad, do not train from it") as caught:
            ckptguard.check_pretrained(path, sums=given, settings=QUICK)
        assert caught.value.outcome == "bad"
    sums.unlink()
    ckptguard.check_pretrained(path, settings=QUICK)
    save_file({"w": torch.full((8, 8), math.nan)}, path)
    with pytest.raises(RefusedError, match="w: all 64 elements are NaN"):
        ckptguard.check_pretrained(path, settings=QUICK)
    ckptguard.check_pretrained(path, allow_nonfinite=["w"], settings=QUICK)
    with pytest.raises(NotFoundError):
        ckptguard.check_pretrained(tmp_path / "nothing.safetensors", settings=QUICK)


def test_pretrained_weights_that_cannot_be_read(tmp_path, monkeypatch):
    """Could not tell is not good, and not bad."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(8, 8)}, path)
    from ckptguard.verification import target

    def unreadable(*_, **__):
        raise CouldNotTellError("the disk does not answer")

    monkeypatch.setattr(target, "scan_checkpoint", unreadable)
    with pytest.raises(CouldNotTellError, match="does not answer"):
        ckptguard.check_pretrained(path, settings=QUICK)
