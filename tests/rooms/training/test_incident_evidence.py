"""Evidence for a report: what a guard remembers and sees, and that none of it can harm training."""

import copy
import io
import time

import pytest
import torch
from support.guards import guarded
from support.views import look

from ckptguard.decisions.health import Diagnosis, Signal
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.reporting.build_report import choose_incident, report_of
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.signals.incident_evidence import (
    MOST,
    AutocastProbe,
    SampleBuffer,
    describe_training,
    gather,
    learning_rate,
    sick_tensors,
)
from ckptguard.values.incident import Sample


def network():
    """Two layers, a normalisation between."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def hooks(model):
    """How many hooks its modules have."""
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def stepped(model, optimizer):
    """One update, so that gradients and moments are there."""
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()


def test_the_last_updates_are_remembered_one_by_one_and_earlier_ones_thinly():
    """256 of them, and every 16th of those before; never more, whatever the length of training."""
    recent = SampleBuffer()
    for step in range(1, 20_001):
        recent.append(Signal(step=step, loss=float(step)))
    steps = [s.step for s in recent.samples()]
    assert steps[-256:] == list(range(20_000 - 255, 20_001))
    assert len(steps) == 512
    assert all(step % 16 == 0 for step in steps[:256])
    assert steps == sorted(steps)


def test_what_a_rollback_undid_is_forgotten():
    """After going back to step 7 the curve ends there, and goes on from there."""
    recent = SampleBuffer()
    for step in range(1, 12):
        recent.append(Signal(step=step, loss=1.0))
    recent.restart(7)
    recent.append(Signal(step=8, loss=float("nan"), grad_norm=float("-inf")))
    assert [s.step for s in recent.samples()] == [*range(1, 9)]
    assert recent.samples()[-1] == Sample(8, "nan", "-inf", None, None)


def test_learning_rates_that_would_wait_are_not_read():
    """A tensor as learning rate may lie on a device: it is left alone."""
    model = network()
    assert learning_rate(torch.optim.SGD(model.parameters(), lr=0.25)) == 0.25
    assert learning_rate(torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25))) is None
    assert learning_rate(None) is None


def test_sick_tensors_in_their_order_with_counts():
    """Weights, buffers, gradients, moments: named by parameter, counted; healthy ones are not there."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    with torch.no_grad():
        model[2].weight[0, :3] = float("nan")
        model[1].running_mean[1] = float("inf")
        model[0].bias.grad[:] = float("-inf")
        optimizer.state[model[2].bias]["exp_avg_sq"][0] = float("nan")
    found, more = sick_tensors(model, optimizer, seconds=60)
    assert more == 0
    assert [(t.kind, t.name, t.nan, t.inf, t.elements) for t in found] == [
        ("weight", "2.weight", 3, 0, 8),
        ("buffer", "1.running_mean", 0, 1, 8),
        ("gradient", "0.bias", 0, 8, 8),
        ("optimizer", "2.bias (exp_avg_sq)", 1, 0, 1),
    ]
    first, _ = sick_tensors(model, optimizer, cause="grad_norm", seconds=60)
    assert first[0].kind == "gradient"


def test_masks_and_allowed_tensors_are_not_sick():
    """What a look forgives, the report forgives."""
    model = network()
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    model.register_buffer("odd", torch.tensor([1.0, float("nan")]))
    assert [t.name for t in sick_tensors(model, None, seconds=60)[0]] == ["odd"]
    assert sick_tensors(model, None, allow=("od*",), seconds=60) == ((), 0)


def test_many_sick_tensors_are_counted_and_not_all_listed():
    """The list is bounded, and says how many were left out. With its time used up it stops looking."""
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.full((2,), float("nan"))) for _ in range(MOST + 7))
    found, more = sick_tensors(model, None, seconds=60)
    assert (len(found), more) == (MOST, 7)
    assert sick_tensors(model, None, seconds=-1.0) == ((), 0)


@pytest.mark.parametrize(("dtype", "seen"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (None, "off")])
def test_the_dtype_of_autocast_is_seen_at_the_first_pass(dtype, seen):
    """Seen from inside of the forward pass; then the hook is gone, and the model is as it was."""
    model = network().eval()
    probe = AutocastProbe(model)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        model(torch.randn(2, 4))
    assert probe.seen == seen
    assert hooks(model) == 0


def test_autocast_inside_of_forward_is_seen():
    """A trainer that wraps the model's own forward, as Accelerate does."""
    model = network().eval()
    probe = AutocastProbe(model)
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    model(torch.randn(2, 4))
    assert probe.seen == "bfloat16"


def test_a_model_that_is_compiled_later_is_compiled_whole():
    """While it is being compiled the hook does nothing that would break it into pieces."""
    model = network().eval()
    AutocastProbe(model)
    model.compile(backend="eager", fullgraph=True)
    assert model(torch.randn(2, 4)).shape == (2, 1)


def test_the_probe_survives_copies_and_pickles():
    """An EMA copy or a whole-model save before the first pass works, and the copy's hook goes as well."""
    model = network().eval()
    probe = AutocastProbe(model)
    copied = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    copied(torch.randn(2, 4))
    assert hooks(copied) == 0
    assert probe.seen is None
    probe.remove()
    assert hooks(model) == 0


def test_a_compiled_model_is_left_alone():
    """No hook that would have it compiled again."""
    model = network()
    model.compile(backend="eager")
    assert AutocastProbe(model).seen is None
    assert hooks(model) == 0


def test_how_training_computes():
    """dtypes by elements, optimizer, eps, rate and scaler; what is frozen does not count."""
    model = network().half()
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, eps=1e-7, weight_decay=0.1)
    found = describe_training(TrainingParts(model=model, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu")))
    assert found.dtypes == {"float16": 4 * 8 + 8 + 16}
    assert (found.optimizer, found.eps, found.lr, found.weight_decay) == ("AdamW", 1e-7, 0.5, 0.1)
    assert (found.loss_scaler, found.device, found.world_size) == ("GradScaler", "cpu", 1)
    assert found.versions["torch"] == torch.__version__


def test_evidence_of_odd_objects_is_less_and_never_an_error():
    """A model that is none, and an optimizer of its own kind: what cannot be told is left out."""

    class Odd:
        param_groups = "none"

        def __getattr__(self, name):
            raise RuntimeError(name)

    found = Diagnosis(step=3, cause="weights", onset_step=3)
    details = gather(found, TrainingParts(model=Odd(), optimizer=Odd()), SampleBuffer(), allow=())
    assert (details.onset, details.tensors) == (3, ())
    assert details.training is None


def test_no_device_is_initialised():
    """Describing training on the CPU touches no accelerator."""
    describe_training(TrainingParts(model=network()))
    assert not torch.cuda.is_initialized()


def sick_run(root):
    """A guarded training whose gradient is infinite at step 5, once."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    left = 1
    with guarded(root, model, optimizer) as guard:
        for step, x in guard.steps([torch.randn(6, 4) for _ in range(20)], total=8, save_every=2):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            poisoned = step == 5 and left > 0
            left -= poisoned
            guard.observe(loss=loss, grad_norm=float("inf") if poisoned else 1.0)


def test_a_rollback_leaves_a_whole_report(tmp_path):
    """Onset, curve up to it, training, what it began from, causes: in the record, as text and as page."""
    sick_run(tmp_path / "run")
    run = open_run(str(tmp_path / "run"))
    (incident,) = list_incidents(run)
    details = incident.known_details()
    assert (incident.state, incident.revision, details.onset) == ("closed", 3, 5)
    assert [s.step for s in details.samples] == [1, 2, 3, 4, 5]
    assert (details.samples[-1].grad_norm, details.samples[-1].lr) == ("inf", 1e-3)
    assert (details.training.optimizer, details.training.autocast) == ("AdamW", "off")
    assert (details.last_good.id, details.last_good.outcome) == ("4.1", "good")
    assert details.last_good.largest[0].largest > 0
    assert details.causes[0].name == "bad_batch"
    folder = tmp_path / "run" / "_ckptguard" / "incidents"
    assert "Likely causes" in (folder / f"{incident.id}.txt").read_text()
    assert (folder / f"{incident.id}.html").read_text().startswith("<!doctype html>")
    assert report_of(look(run), choose_incident(run, None)).details == details


def test_a_report_that_cannot_be_made_stops_nothing(tmp_path, monkeypatch, caplog):
    """Training goes back and ends although evidence and conclusions fail."""

    def broken(*_, **__):
        raise RuntimeError("no report today")

    monkeypatch.setattr("ckptguard.reporting.open_and_close.report_of", broken)
    monkeypatch.setattr("ckptguard.training.signals.incident_evidence.sick_tensors", broken)
    sick_run(tmp_path / "run")
    (incident,) = list_incidents(open_run(str(tmp_path / "run")))
    assert (incident.state, incident.known_good) == ("closed", "4.1")
    assert "no report today" in caplog.text


def test_looking_stops_in_time(monkeypatch):
    """The time limit holds between two tensors: the clock decides, not the number of tensors."""
    now = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.full((2,), float("nan"))) for _ in range(40))
    found, _ = sick_tensors(model, None, seconds=10.0)
    assert 0 < len(found) < 20
