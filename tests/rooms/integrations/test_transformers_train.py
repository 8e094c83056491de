"""``ckptguard.integrations.transformers.train``: the Trainer goes back by itself, and loses nothing by it."""

import gc

import pytest
from support.last_saves import recorded_outcome_of_last
from support.runs import QUICK

import ckptguard
from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.errors import NoKnownGoodError, RollbackExhausted, SettingsError, SickTrainingError
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.tiny_trainer import Overflow, Regression, everything, examples, same, tiny_trainer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

REPLAY = RollbackPolicy(skip=False)


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """accelerate has garbage collected in every training: what modules before this one have left is not looked at."""
    gc.collect()
    gc.freeze()


def train(trainer, **arguments):
    """The call under test, without a daemon."""
    return ckptguard.integrations.transformers.train(trainer, **({"settings": QUICK, "daemon": "off"} | arguments))


def incidents(output):
    """What the run's records tell of."""
    return list_incidents(open_run(str(output)))


@pytest.mark.parametrize("at", [5, 7, 9])
def test_a_rollback_that_replays_ends_like_a_run_that_never_failed(tmp_path, at):
    """Dropout, batch statistics, warm-up, shuffling, accumulation, an epoch's end: all bit for bit."""
    untouched = tiny_trainer(tmp_path / "untouched")
    untouched.train()
    struck = tiny_trainer(tmp_path / "struck", Overflow(at), save_total_limit=1)
    output = train(struck, policy=REPLAY)
    assert output.global_step == 14
    assert len(incidents(tmp_path / "struck")) == 1
    assert same(everything(struck), everything(untouched))
    assert verify_target(str(tmp_path / "struck"), QUICK).outcome is Outcome.GOOD


def test_guarding_a_healthy_run_changes_nothing(tmp_path):
    """No incident, and the same bits as without us."""
    alone = tiny_trainer(tmp_path / "alone")
    alone.train()
    guarded = tiny_trainer(tmp_path / "guarded")
    train(guarded)
    assert same(everything(guarded), everything(alone))
    assert recorded_outcome_of_last(tmp_path / "guarded") is Outcome.GOOD
    assert incidents(tmp_path / "guarded") == []
    assert "training_step" not in vars(guarded)


def test_a_batch_that_overflows_is_left_out_and_nothing_else(tmp_path):
    """The batch would do the same harm again: its update is not made, all others are, each on its own batch."""
    count = 14 * 8  # one epoch
    plain = Watching()
    tiny_trainer(tmp_path / "plain", plain, data=examples(count), model=plain).train()
    [victim] = [labels[0] for update, labels in plain.updates if update == 8][:1]
    data = examples(count)
    [entry] = [e for e in data if torch.equal(e["labels"], victim)]
    entry["labels"] = torch.tensor(3e38)
    seen = Watching()
    struck = tiny_trainer(tmp_path / "out", seen, data=data, model=seen, logging_steps=5)
    train(struck)
    assert struck.state.global_step == 14
    assert all(torch.isfinite(value).all() for value in struck.model.state_dict().values())
    assert len(incidents(tmp_path / "out")) == 1
    replayed = seen.updates[-2 * (14 - 6 - 1) :]  # from checkpoint-6: two batches for each update but one
    assert [update for update, _ in replayed] == [u for u in (7, *range(9, 15)) for _ in range(2)]
    expected = {(u, i): labels for i, (u, labels) in enumerate(plain.updates) if u > 6 and u != 8}
    assert same([labels for _, labels in replayed], list(expected.values()))


class Watching(Regression, transformers.TrainerCallback):
    """The model, and a callback that knows which update each batch was used for."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = []
        self._update = 0

    def forward(self, x, labels=None):
        if self.training:
            self.updates.append((self._update, labels.clone()))
        return super().forward(x, labels)

    def on_step_begin(self, args, state, control, **kwargs):
        self._update = state.global_step + 1


def test_a_fault_that_comes_back_spends_the_budget(tmp_path):
    """Twice near each other: further back, with half the learning rate; then the report is named."""
    struck = tiny_trainer(tmp_path / "out", Overflow(7, 9, 11), max_steps=40)
    rates = []

    class Rates(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, lr_scheduler=None, **kwargs):
            rates.append((state.global_step + 1, lr_scheduler.get_last_lr()[0]))

    struck.add_callback(Rates())
    with pytest.raises(RollbackExhausted) as caught:
        train(struck, policy=RollbackPolicy(skip=False, budget=2))
    assert caught.value.report is not None
    by_update = {}
    for update, rate in rates:
        by_update.setdefault(update, []).append(rate)
    assert by_update[7] == pytest.approx([by_update[7][0], by_update[7][0], by_update[7][0] / 2])
    assert len(incidents(tmp_path / "out")) == 3


def test_a_rate_that_was_cut_comes_back_in_the_trainer(tmp_path):
    """From the third update after the last incident on, the rates are those of a run that never failed."""

    def rates(folder, *at):
        found, made = {}, tiny_trainer(tmp_path / folder, Overflow(*at), max_steps=20)

        class Rates(transformers.TrainerCallback):
            def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
                found[state.global_step + 1] = optimizer.param_groups[0]["lr"]

        made.add_callback(Rates())
        train(made, policy=RollbackPolicy(skip=False, lr_back=3))
        return found

    whole, struck = rates("whole"), rates("struck", 7, 9)
    ratio = {step: round(struck[step] / whole[step], 6) for step in whole if whole[step]}
    assert {step: ratio[step] for step in range(7, 13)} == dict.fromkeys(range(7, 13), 0.5)
    assert all(ratio[step] == 1.0 for step in ratio if step > 12)


def test_a_masked_batch_is_no_incident(tmp_path):
    """Its loss is NaN, no gradient comes of it, and nothing is harmed."""

    class Masking(Regression):
        def forward(self, x, labels=None):
            found = super().forward(x, labels)
            if self.training and torch.rand(()) < 0.2:
                none = found["logits"][:0]
                found["loss"] = none.mean()
            return found

    trained = tiny_trainer(tmp_path / "out", model=Masking())
    train(trained)
    assert trained.state.global_step == 14
    assert incidents(tmp_path / "out") == []


def test_a_restart_resumes_at_the_known_good_and_not_at_the_highest_number(tmp_path):
    """The newest save is cut short, as a full disk or a crash leaves it; a plain restart would have taken it."""
    untouched = tiny_trainer(tmp_path / "untouched")
    untouched.train()
    first = tiny_trainer(tmp_path / "out", StopAt(10))
    train(first)
    weights = tmp_path / "out" / "checkpoint-9" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    second = tiny_trainer(tmp_path / "out")
    train(second)
    assert same(everything(second), everything(untouched))


class StopAt(transformers.TrainerCallback):
    """Ends training early, as a job's time limit does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def test_sick_before_the_first_save(tmp_path):
    """There is nothing to go back to, and it says so."""
    with pytest.raises(NoKnownGoodError):
        train(tiny_trainer(tmp_path / "out", Overflow(2)))


def test_a_model_that_is_sick_from_the_start(tmp_path):
    """A damaged pretrained file is caught before the first update."""
    model = Regression()
    with torch.no_grad():
        model.net[0].weight.mul_(1e38).mul_(1e38)
    trainer = tiny_trainer(tmp_path / "out", model=model)
    with pytest.raises(SickTrainingError, match=r"net.0.weight"):
        train(trainer)
    assert trainer.state.global_step == 0


def test_beginning_anew_refuses_a_used_run(tmp_path):
    """Else a rollback could lead into the earlier training."""
    train(tiny_trainer(tmp_path / "out", max_steps=3))
    with pytest.raises(SettingsError, match="holds checkpoints already"):
        train(tiny_trainer(tmp_path / "out", max_steps=3), resume_from_checkpoint=False)


def test_a_callback_that_the_user_added_does_not_end_it(tmp_path):
    """train() goes back all the same, and the callback is there afterwards."""
    guard = ckptguard.integrations.transformers.GuardCallback(settings=QUICK, daemon="off")
    struck = tiny_trainer(tmp_path / "out", Overflow(7))
    struck.add_callback(guard)
    train(struck)
    assert struck.state.global_step == 14
    assert guard in struck.callback_handler.callbacks


def test_a_sick_state_after_the_last_save_is_not_the_result(tmp_path):
    """The last update poisons the model; what train() leaves is healthy."""
    struck = tiny_trainer(tmp_path / "out", Overflow(14), logging_steps=500)
    train(struck, policy=RollbackPolicy(check_every=500))
    assert struck.state.global_step == 14
    assert all(torch.isfinite(value).all() for value in struck.model.state_dict().values())


def test_an_end_without_updates_is_no_success(tmp_path):
    """No loss shows a statistic that overflowed. Seen at the end, it puts all updates under suspicion: that is said."""

    class Statistics(transformers.TrainerCallback):
        struck = False

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 5 and not self.struck:
                self.struck = True
                model.net[1].running_var.mul_(1e38).mul_(1e38)

    train(tiny_trainer(tmp_path / "out", max_steps=3, logging_steps=500))
    struck = tiny_trainer(tmp_path / "out", Statistics(), max_steps=10, save_strategy="no", logging_steps=500)
    with pytest.raises(RollbackExhausted, match="went back to step 3 no update was made: all 7 up to the end"):
        train(struck, policy=RollbackPolicy(check_every=500))


def test_a_crash_after_the_rollback_costs_one_more(tmp_path):
    """A new process resumes at the same checkpoint, meets the harmful batch again, goes back, and leaves it out."""

    class Dies(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 8 and incidents(tmp_path / "out"):
                raise ValueError("the machine went away")

    def struck(*callbacks):
        data = examples(14 * 8)
        data[victim]["labels"] = torch.tensor(3e38)
        model = Watching()
        return tiny_trainer(tmp_path / "out", model, *callbacks, data=data, model=model), model

    plain = Watching()
    tiny_trainer(tmp_path / "plain", plain, data=examples(14 * 8), model=plain).train()
    label = next(labels[0] for update, labels in plain.updates if update == 8)
    victim = next(n for n, e in enumerate(examples(14 * 8)) if torch.equal(e["labels"], label))
    with pytest.raises(ValueError, match="went away"):
        train(struck(Dies())[0])
    trainer, seen = struck()
    train(trainer)
    assert trainer.state.global_step == 14
    assert len(incidents(tmp_path / "out")) == 2
    made = [update for update, _ in seen.updates]
    assert made.count(8) == made.count(9)  # made once, by the poisoned batch
    assert sorted(set(made)) == [*range(7, 15)]
