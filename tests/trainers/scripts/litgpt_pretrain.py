"""litgpt's own pretraining: ``step-00000002/lit_model.pth`` with two YAML files, and ``final``; ``--resume auto`` takes
the highest step below the output folder."""

import packages  # first

# isort: split

import litgpt.pretrain as pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from tells import FROM, LAST, RUN, Path, Tells, torch
from torchdata.stateful_dataloader import StatefulDataLoader

tells = Tells(RUN)
save_checkpoint, fit = pretrain.save_checkpoint, pretrain.fit


class Tokens(DataModule):
    """The same tokens again and again."""

    def connect(self, *rest, **named):
        pass

    def train_dataloader(self):
        made = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))
        return StatefulDataLoader(made, batch_size=2)

    val_dataloader = train_dataloader


def observed_save(fabric, state, tokenizer_dir, file):
    step = state["step_count"]
    if tells.is_poisoned(step):
        packages.poison(state["model"])
    save_checkpoint(fabric, state, tokenizer_dir, file)
    tells.saved(step, state["model"].state_dict(), Path(file).parent)


def observed_fit(*, state, **named):
    step = state["step_count"]
    tells.started(step, state["model"].state_dict() if step else None)
    fit(state=state, **named)


pretrain.save_checkpoint, pretrain.fit = observed_save, observed_fit
size = {"block_size": 16, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}
tokens = LAST * 2 * 16
pretrain.setup(
    "pythia-14m",
    model_config=Config(name="tiny", **size),
    out_dir=RUN,
    precision="32-true",
    resume=Path(FROM) / "lit_model.pth" if FROM else "auto",
    data=Tokens(),
    train=TrainArgs(
        save_interval=1,
        log_interval=1,
        global_batch_size=2,
        micro_batch_size=2,
        max_tokens=tokens,
        max_norm=1.0,
        min_lr=1e-4,
        lr_warmup_steps=1,
        max_seq_length=16,
        tie_embeddings=False,
    ),
    eval=EvalArgs(interval=1000, max_iters=1, initial_validation=False, final_validation=False),
    devices=1,
    logger_name="csv",
)
