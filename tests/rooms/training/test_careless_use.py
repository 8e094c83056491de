"""Loops and parts of odd shape: whatever users write, training goes on or one sentence says why not."""

import logging

import pytest
import torch
from support.guards import guarded as guard_of

from ckptguard.errors import DeniedError, SettingsError, StateError
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.rollback.incident_log import begin_incident, end_incident
from ckptguard.training.signals.weights import first_of


def test_gradients_that_were_being_accumulated_do_not_outlive_a_rollback(tmp_path):
    """A poisoned micro-batch leaves NaN in the gradients, to which the next ones after the rollback would be added."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.full((2, 3), float(n)) for n in range(1, 41)]
    batches[17] *= float("inf")
    guard = guard_of(tmp_path / "run", model, optimizer)
    for step, batch in guard.steps(batches, total=30, save_every=4):
        loss = model(batch).square().mean() / 4000
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if step % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        guard.observe(loss=loss, grad_norm=norm)
    assert guard.step == 30
    assert first_of(list(model.named_parameters())) is None


class Both:
    """Two optimizers in one object, as people write it."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def state_dict(self):
        """All states."""
        return {str(n): optimizer.state_dict() for n, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state):
        """Put them back."""
        for n, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(n)])


def test_an_optimizer_without_groups_survives_a_repeat(tmp_path, caplog):
    """The repeat would lower the learning rate, which this object does not show: that is said."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    both = Both(torch.optim.SGD([model.weight], lr=0.01), torch.optim.Adam([model.bias], lr=0.01))
    guard = guard_of(tmp_path / "run", model, both)
    poisoned = {9, 11}
    for step, _ in guard.steps([1, 2, 3], total=14, save_every=2):
        if step in poisoned:
            poisoned.discard(step)
            torch.nn.init.constant_(model.weight, float("nan"))
        guard.observe(loss=1.0)
    assert guard.step == 14
    assert "the learning rate does not change" in caplog.text


@pytest.mark.parametrize("parameters", [[torch.zeros(3)], {"rate": 1}, lambda scale: scale, lambda: ["a"], None])
def test_a_model_of_ones_own_may_call_anything_its_parameters(tmp_path, parameters):
    """Only `state_dict` and `load_state_dict` are asked of a model: it is saved, resumed, and taken back."""

    class Own:
        """What people write without torch's modules."""

        def __init__(self):
            self.weight, self.parameters = torch.zeros(3), parameters

        def state_dict(self):
            """Its state."""
            return {"weight": self.weight}

        def load_state_dict(self, state):
            """Put it back."""
            self.weight.copy_(state["weight"])

    model, poison = Own(), {5: float("nan")}
    with guard_of(tmp_path / "run", model) as guard:
        for step, _ in guard.steps([1, 2, 3], total=6, save_every=2):
            model.weight += poison.pop(step, 1.0)
            guard.observe(loss=1 / step)
    assert guard.step == 6
    assert model.weight.tolist() == [6, 6, 6]
    assert guard_of(tmp_path / "run", Own()).resume() == 6
    assert len(list_incidents(open_run(str(tmp_path / "run")))) == 1


def test_a_list_of_optimizers_is_refused_by_name(tmp_path):
    """Not with an AttributeError from inside."""
    model = torch.nn.Linear(3, 2)
    with pytest.raises(StateError, match="the optimizer is a list"):
        guard_of(tmp_path / "run", model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def test_a_loop_that_is_still_held_does_not_disturb_the_next(tmp_path):
    """A notebook's last traceback keeps an interrupted loop alive; it is closed when that goes."""
    guard = guard_of(tmp_path / "run", torch.nn.Linear(3, 2))
    held = guard.steps([1, 2, 3], total=9, save_every=3)
    next(held)
    guard.observe(loss=1.0)
    next(held)
    seen = []
    for step, _ in guard.steps([1, 2, 3], total=9, save_every=3):
        seen.append(step)
        guard.observe(loss=1.0)
        if step == 4:
            held.close()
    assert seen == [2, 3, 4, 5, 6, 7, 8, 9]
    assert guard.step == 9


def test_steps_inside_of_steps_is_refused(tmp_path):
    """The outer loop cannot go on once the inner one has moved training."""
    guard = guard_of(tmp_path / "run", torch.nn.Linear(3, 2))
    outer = guard.steps([1, 2], total=6, save_every=3)
    next(outer)
    assert [step for step, _ in guard.steps([1, 2], total=4, save_every=3)] == [1, 2, 3, 4]
    with pytest.raises(SettingsError, match=r"another steps\(\)"):
        next(outer)


ODD = {
    "coo": lambda plain: plain.to_sparse(),
    "csr": lambda plain: plain.reshape(1, 3).to_sparse_csr(),
    "nested": lambda plain: torch.nested.nested_tensor([plain, plain[:1]]),
    "blocked": lambda plain: plain.to_mkldnn() if torch.backends.mkldnn.is_available() else plain,
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of what torch still calls beta
@pytest.mark.parametrize("layout", ODD)
def test_tensors_of_any_layout_are_looked_at(layout):
    """Sparse ones are gradients of an embedding, for example."""
    tensor = ODD[layout](torch.tensor([1.0, float("nan"), 2.0]))
    assert first_of([("fine", torch.ones(2)), (layout, tensor)]) == layout


def test_a_probe_with_sparse_gradients(tmp_path):
    """The probe looks at gradients, and what it raises by itself comes out as it is."""
    model = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    for _ in guard_of(tmp_path / "run", model, optimizer).steps([1], total=2, save_every=1):
        pass
    assert guard_of(tmp_path / "run", model, optimizer).resume(probe=lambda: model(torch.tensor([1])).sum()) == 2

    def broken():
        raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        guard_of(tmp_path / "run", model, optimizer).resume(probe=broken)


def test_a_failed_save_is_told_in_a_sentence(tmp_path, monkeypatch, caplog):
    """A full disk needs no traceback; what nobody expected does."""
    model = torch.nn.Linear(3, 2)
    failure = [DeniedError("no space left", key="step-1")]
    guard = guard_of(
        tmp_path / "run",
        model,
        save=lambda path, step: (_ for _ in ()).throw(failure[0]),
        load=lambda path: None,
    )
    for failure[0] in (DeniedError("no space left", key="step-1"), ZeroDivisionError("a bug")):
        caplog.clear()
        guard._save_automatically(1)
        [said] = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert bool(said.exc_info) is isinstance(failure[0], ZeroDivisionError)


def test_processes_that_do_not_know_of_each_other_are_warned(tmp_path, monkeypatch, caplog):
    """torchrun without init_process_group: each process would set the others' saves aside."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    guard_of(tmp_path / "run", torch.nn.Linear(1, 1))
    assert "call init_process_group first" in caplog.text


class Stream:
    """A loader whose iterator cannot be made anew."""

    def __init__(self, count):
        self.batches = iter(range(count))

    def __iter__(self):
        return self.batches


def test_a_loader_that_gives_the_same_iterator_goes_on_where_it_was(tmp_path):
    """No batch is drawn just to be dropped, and it is said that the replay is none."""
    guard = guard_of(tmp_path / "run", torch.nn.Linear(1, 1))
    seen, went_back = [], False
    for step, batch in guard.steps(Stream(20), total=8, save_every=4):
        seen.append((step, batch))
        guard.observe(loss=1.0)
        if step == 6 and not went_back:
            went_back = True
            guard.rollback()
    assert seen == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (5, 6), (6, 7), (7, 8), (8, 9)]
    assert any("the same iterator every time" in why for why in guard.missing_for_exact_resume)
    short = guard_of(tmp_path / "short", torch.nn.Linear(1, 1)).steps(Stream(3), total=8, save_every=4)
    with pytest.raises(SettingsError, match="yields no batches") as caught:
        list(short)
    assert "from the beginning each time" in caught.value.hint


def test_workers_that_are_kept_are_told_of(tmp_path):
    """Their random numbers are theirs: what they draw after a rollback is not what they drew before."""
    loader = torch.utils.data.DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)
    guard = guard_of(tmp_path / "run", torch.nn.Linear(1, 1))
    for step, _ in guard.steps(loader, total=4, save_every=2):
        if step == 3 and not guard.missing_for_exact_resume:
            guard.rollback()
    assert "persistent_workers" in guard.missing_for_exact_resume[0]


class Shuffled(torch.utils.data.IterableDataset):
    """Shuffles within a buffer as it goes, by the numbers that dropout draws, too."""

    def __iter__(self):
        buffer = []
        for n in range(60):
            buffer.append(n)
            if len(buffer) == 8:
                yield buffer.pop(int(torch.randint(8, ())))


def test_an_order_that_depends_on_what_training_draws_is_told_of(tmp_path):
    """It cannot be drawn again alike; what draws only for the batch itself can."""
    for loader, told in ((Shuffled(), True), ([1, 2, 3, 4], False)):
        guard = guard_of(tmp_path / f"run-{told}", torch.nn.Linear(1, 1))
        went_back = False
        for step, _ in guard.steps(loader, total=6, save_every=2):
            torch.rand(1)
            if step == 3 and not went_back:
                went_back = True
                guard.rollback()
        assert any("depends on both" in why for why in guard.missing_for_exact_resume) is told


def test_a_save_cannot_claim_updates_that_are_not_made(tmp_path, caplog):
    """A later start would resume there, and find nothing left to do."""
    guard = guard_of(tmp_path / "run", torch.nn.Linear(1, 1))
    loop = guard.steps([1, 2], total=6, save_every=3)
    next(loop)
    with pytest.raises(SettingsError, match="step 500 is not made yet"):
        guard.save(step=500)
    assert len(list(loop)) == 5
    assert list(guard_of(tmp_path / "run", torch.nn.Linear(1, 1)).steps([1, 2], total=4, save_every=3)) == []
    assert "nothing is left of a total of 4" in caplog.text


@pytest.mark.parametrize(("prefix", "inside"), [("_orig_mod.", ""), ("module.", ""), ("_orig_mod.", "0.")])
def test_names_that_a_wrapper_changed_are_told_by_its_prefix(tmp_path, prefix, inside):
    """Saved compiled and loaded plain, and the other way round; also where a part of the model was compiled."""
    names = [f"{inside}weight", f"{inside}bias"]
    wrapped = [f"{inside}{prefix}{name.removeprefix(inside)}" for name in names]
    parts = TrainingParts(model=torch.nn.Linear(1, 1))
    with pytest.raises(StateError, match=f'only the saved names have "{prefix}"'):
        parts.compare(missing=names, unexpected=wrapped)
    with pytest.raises(StateError, match=f'only the present names have "{prefix}"'):
        parts.compare(missing=wrapped, unexpected=names)
    with pytest.raises(StateError) as other:
        parts.compare(missing=names, unexpected=wrapped[:1])
    assert prefix not in str(other.value)


def test_what_could_never_be_loaded_is_refused_before_the_first_step(tmp_path):
    """A name that is no text, and a buffer whose elements are one."""
    model = torch.nn.Module()
    model.register_parameter("a\udc80b", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(StateError, match="not Unicode text") as refused:
        guard_of(tmp_path / "run", model)
    str(refused.value).encode()
    model = torch.nn.Linear(2, 2)
    model.register_buffer("table", torch.ones(1, 2).expand(4, 2))
    with pytest.raises(StateError, match="table is expanded"):
        guard_of(tmp_path / "run", model)
    model.table = torch.arange(4).expand((1, -1))  # of one row: every element is its own
    guard_of(tmp_path / "run", model).save(1)
    assert guard_of(tmp_path / "run", model).resume() == 1


def test_an_incident_of_any_text_is_recorded_and_nothing_raises(tmp_path, monkeypatch):
    """Half of a character in a tensor's name, and a failure of our own."""
    run = open_run(str(tmp_path))
    found = begin_incident(run, step=1, cause="weights", reason="a\udc80b", evidence={"n\udc80": ["\udc80"]})
    assert end_incident(run, found, action="\udc80") is not None
    [recorded] = list_incidents(run)
    assert (recorded.reason, recorded.state) == ("a\\udc80b", "closed")
    monkeypatch.setattr("ckptguard.training.rollback.incident_log.open_incident", lambda *_, **__: 1 / 0)
    assert begin_incident(run, step=1, cause="weights", reason="r", evidence={}) is None


def test_nothing_hangs_on_a_guarded_model_before_training_begins(tmp_path):
    """torch.jit.script fails on every hook that is no function."""
    model = torch.nn.Linear(2, 2)
    guard = guard_of(tmp_path / "run", model)
    assert not model._forward_pre_hooks
    guard.observe(loss=1.0)
    assert model._forward_pre_hooks
    guard.close()
    assert not model._forward_pre_hooks


def test_what_cannot_be_recorded_is_said_once_until_something_is(tmp_path, monkeypatch, caplog):
    """On a full disk every save fails for its own path, and none of the incidents can be written."""
    run = open_run(str(tmp_path))

    def told(reason):
        caplog.clear()
        begin_incident(run, step=1, cause="storage", reason=reason, evidence={})
        return len(caplog.messages)

    with monkeypatch.context() as full:
        full.setattr("ckptguard.records.incidents.create_record", lambda *_: (_ for _ in ()).throw(OSError("full")))
        assert [told("no space for step-000000001/model"), told("no space for step-000000002/model")] == [1, 0]
        assert [told("rank 3 is gone"), told("no space for tmp-step-000000002-0a1b2c3d")] == [1, 1]
    assert told("no space for step-000000003/model") == 0
    with monkeypatch.context() as full:
        full.setattr("ckptguard.records.incidents.create_record", lambda *_: (_ for _ in ()).throw(OSError("full")))
        assert told("no space for step-000000004/model") == 1
