"""Tiny trainings under Hugging Face's Trainer, and the faults that befall them."""

from __future__ import annotations

import torch
import transformers


class Regression(torch.nn.Module):
    """A small model with dropout and batch statistics, so that random numbers and buffers count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )

    def forward(self, x, labels=None):
        found = self.net(x).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


class Overflow(transformers.TrainerCallback):
    """A fault of the machine: once, after an update, a weight is multiplied until it overflows."""

    def __init__(self, *at: int) -> None:
        self.at = set(at)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step in self.at:
            self.at.discard(state.global_step)
            with torch.no_grad():
                next(model.parameters()).mul_(1e38).mul_(1e38).mul_(1e38)


def examples(count: int = 48, *, huge: int | None = None):
    """The same examples for every call; one of them is so large that its loss overflows."""
    generator = torch.Generator().manual_seed(1)
    made = [
        {"x": torch.randn(4, generator=generator), "labels": torch.randn((), generator=generator)} for _ in range(count)
    ]
    if huge is not None:
        made[huge]["labels"] = torch.tensor(3e38)
    return made


def tiny_trainer(output, *callbacks, data=None, model=None, **arguments):
    """A Trainer that saves every 3rd of 14 updates; 6 updates are an epoch, shuffled."""
    torch.manual_seed(0)
    usual = {
        "max_steps": 14,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return transformers.Trainer(
        model if model is not None else Regression(),
        transformers.TrainingArguments(str(output), **(usual | arguments)),
        train_dataset=data if data is not None else examples(),
        eval_dataset=examples(4),
        callbacks=list(callbacks),
    )


def everything(trainer):
    """All that training has made: weights, buffers, optimizer, scheduler, and the log without its times."""
    untimed = [
        {k: v for k, v in entry.items() if k in ("step", "loss", "grad_norm", "learning_rate")}
        for entry in trainer.state.log_history
    ]
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "log": [entry for entry in untimed if "loss" in entry],
        "step": trainer.state.global_step,
    }


def same(one, other) -> bool:
    """Equal bit for bit, through dictionaries, lists and tensors."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (hasattr(one, "__dict__") and same(vars(one), vars(other)))


def tokenizer():
    """One word for each number."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, **{str(i): i for i in range(1, 64)}}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
