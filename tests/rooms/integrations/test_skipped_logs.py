"""Updates that are left out are in no average and in no log, and only those are left out that showed a sign."""

import json
import math
import random

import pytest
from support.runs import QUICK

import ckptguard

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.tiny_trainer import Regression, examples, tokenizer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
SAVE_EVERY, LAST = 3, 14


class Counting:
    """A Trainer's class that computes NaN for one batch, whenever it comes, and notes the losses by update."""

    bad = -1  # the update whose batch it is
    victim = None
    first = True

    def training_step(self, model, inputs, *arguments, **named):
        """The Trainer's, noted."""
        update, seen = self.state.global_step + 1, next(v for v in inputs.values() if isinstance(v, torch.Tensor))
        if update == self.bad and self.victim is None:
            self.victim = seen.clone()
        self.strikes = self.victim is not None and torch.equal(seen, self.victim)
        loss = super().training_step(model, inputs, *arguments, **named)
        self.notes.append((update, loss.item()))
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, **named):
        """The Trainer's, and NaN for the victim."""
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, **named)
        factor = math.nan if self.strikes else 1.0
        return (found[0] * factor, found[1]) if return_outputs else found * factor


class Logs(transformers.TrainerCallback):
    """What wandb or TensorBoard would get."""

    def __init__(self, notes):
        self.entries, self.notes, self.begun = [], notes, 0

    def on_train_begin(self, args, state, control, **_):
        self.begun = state.global_step
        self.notes.clear()
        self.entries.clear()  # what was logged before training went back cannot be taken back

    def on_log(self, args, state, control, logs=None, **_):
        self.entries.append((state.global_step, dict(logs)))


def check(trainer, logs, output, *, bad, folder):
    """Everything that was logged is of the updates that were trained, computed here a second time."""
    by_update = {}
    for update, loss in trainer.notes:
        by_update[update] = by_update.get(update, 0.0) + loss
    begun = logs.begun
    assert set(by_update) == set(range(begun + 1, LAST + 1)) - {bad}, "only the batch with the sign is left out"
    assert output.training_loss == pytest.approx(sum(by_update.values()) / len(by_update), rel=1e-4)
    history = trainer.state.log_history
    assert json.loads((folder / f"checkpoint-{LAST}" / "trainer_state.json").read_text())["log_history"] == history[:-1]
    logged = [entry for entry in history if "loss" in entry]
    assert all(entry["loss"] > 0 and entry.get("grad_norm", 1.0) > 0 for entry in logged)
    assert all(entry.get("loss", 1.0) != 0 and entry.get("grad_norm", 1.0) != 0 for _, entry in logs.entries)
    assert history[-1]["train_loss"] == output.training_loss
    since = begun
    for entry in (entry for entry in logged if entry["step"] > begun):
        part = [by_update[u] for u in range(since + 1, entry["step"] + 1) if u != bad]
        assert entry["loss"] == pytest.approx(sum(part) / len(part), rel=1e-3, abs=1e-3)
        since = entry["step"]


def cases(count, seed):
    """Positions of the bad batch, how often is logged, how many batches are an update: by chance, corners first."""
    chance = random.Random(seed)
    yield from [(8, 1, 1), (8, 5, 2), (14, 5, 1), (4, 3, 2)]
    for _ in range(count):
        yield chance.randint(4, LAST), chance.choice([1, 2, 3, 4, 5, 7, 20]), chance.choice([1, 2, 3])


@pytest.mark.parametrize(("bad", "logging_steps", "accumulation"), list(cases(12, seed=20)))
def test_a_trainer_logs_only_what_was_trained(tmp_path, bad, logging_steps, accumulation):
    """No loss of 0, no norm of 0, and averages over the trained updates, in the log, the history and train_loss."""

    class Trainer(Counting, transformers.Trainer):
        notes: list = []  # noqa: RUF012
        strikes = False

    Trainer.bad, Trainer.notes = bad, []
    logs = Logs(Trainer.notes)
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=LAST, save_steps=SAVE_EVERY, logging_steps=logging_steps, report_to=[], use_cpu=True,
        per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(Regression(), arguments, train_dataset=examples(120), callbacks=[logs])
    output = ckptguard.integrations.transformers.train(trainer, settings=QUICK, daemon="off")
    check(trainer, logs, output, bad=bad, folder=tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("bad", "logging_steps", "accumulation"), [(8, 1, 1), (9, 4, 2), (14, 3, 1)])
def test_trl_logs_only_what_was_trained(tmp_path, bad, logging_steps, accumulation):
    """SFTTrainer has averages of its own beside the Trainer's."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class Trainer(Counting, SFTTrainer):
        notes: list = []  # noqa: RUF012
        strikes = False

    Trainer.bad, Trainer.notes = bad, []
    logs = Logs(Trainer.notes)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=False,
        )
    )  # fmt: skip
    rows = Dataset.from_list([{"input_ids": [(i * k) % 63 + 1 for k in range(1, 9)]} for i in range(1, 121)])
    arguments = SFTConfig(
        str(tmp_path), bf16=False, max_steps=LAST, save_steps=SAVE_EVERY, logging_steps=logging_steps, report_to=[],
        use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[logs], processing_class=tokenizer())
    output = ckptguard.integrations.transformers.train(trainer, settings=QUICK, daemon="off")
    check(trainer, logs, output, bad=bad, folder=tmp_path)


class Harm(transformers.TrainerCallback):
    """The update for one batch leaves weights that are not finite, though its loss and its norm are."""

    def on_step_end(self, args, state, control, model=None, **_):
        if self.trainer.struck:
            self.trainer.struck = False
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)


@pytest.mark.parametrize("bad", [5, 7, 8, 11])
def test_an_update_without_a_sign_is_left_out_when_the_sickness_comes_back(tmp_path, bad):
    """First the batch with the first NaN loss is skipped, then also the one before it, which did the harm."""

    class Trainer(Counting, transformers.Trainer):
        notes: list = []  # noqa: RUF012
        strikes = struck = False

        def training_step(self, *arguments, **named):
            found = super().training_step(*arguments, **named)
            self.struck = self.struck or self.strikes
            return found

        def compute_loss(self, *arguments, **named):
            return super(Counting, self).compute_loss(*arguments, **named)

    Trainer.bad, Trainer.notes = bad, []
    harm, logs = Harm(), Logs(Trainer.notes)
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=LAST, save_steps=SAVE_EVERY, logging_steps=1, report_to=[], use_cpu=True,
        per_device_train_batch_size=2, disable_tqdm=True,
    )  # fmt: skip
    harm.trainer = trainer = Trainer(Regression(), arguments, train_dataset=examples(120), callbacks=[harm, logs])
    ckptguard.integrations.transformers.train(trainer, settings=QUICK, daemon="off")
    assert trainer.state.global_step == LAST
    assert bad not in {update for update, _ in Trainer.notes}
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())
