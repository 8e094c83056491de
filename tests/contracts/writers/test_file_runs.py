"""Layouts whose writers are a few lines around torch.save and safetensors: damaged, and loaded by torch."""

import pytest
from contract import Contract, Kind, way_back
from groups import BY_KIND

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytest.importorskip("safetensors")
pytestmark = [pytest.mark.writers, pytest.mark.torch, pytest.mark.timeout(400)]

TAGS = {"0": 0, "1": 1, "2": 2}
KINDS = [
    Kind(
        "megatron/ranks",
        layout="megatron",
        series="iter_#",
        path="iter_{}",
        steps={"0000250": 250, "0000500": 500, "0000750": 750},
        roles=("model", "optimizer", "scheduler", "rng"),
        main="mp_rank_01/model_optim_rng.pt",
    ),
    Kind(
        "wenet/epochs",
        layout="wenet",
        series="epoch_#.pt",
        path="epoch_{}.pt",
        steps=TAGS,
        roles=("model",),
        plain=("*.yaml",),
        beside=("epoch_{}.yaml",),
        others=("init.pt",),
    ),
    Kind(
        "wenet/steps",
        layout="wenet",
        series="step_#.pt",
        path="step_{}.pt",
        steps={"1": 1, "3": 3, "5": 5},
        roles=("model",),
        plain=("*.yaml",),
        beside=("step_{}.yaml",),
        others=("init.pt", "epoch_#.pt"),
    ),
    Kind(
        "wenet/converted",
        layout="wenet",
        series="epoch_#.pt",
        path="epoch_{}.pt",
        steps=TAGS,
        roles=("model",),
        plain=("*.yaml",),
        beside=("epoch_{}.yaml",),
        main="pytorch_model.bin",
    ),
    Kind(
        "wenet/tags",
        layout="deepspeed",
        series="epoch_#",
        path="epoch_{}",
        steps=TAGS,
        roles=("model", "optimizer", "scheduler"),
        main="bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ),
    Kind(
        "hallo/stage1",
        layout="accelerate",
        series="checkpoints/checkpoint-#",
        path="checkpoints/checkpoint-{}",
        steps={"2": 2, "4": 4, "6": 6},
        roles=("model", "optimizer", "scheduler", "rng"),
        needed=("*_states.pt",),
        plain=("*.py", "latest"),
        others=tuple(
            f"{folder}{part}_unet{end}"
            for part in ("reference", "denoising")
            for folder, end in (("modules/", "-#.pth"), ("", ".pth"))
        ),
        main="pytorch_model/mp_rank_00_model_states.pt",
    ),
    Kind(
        "nanovlm/nested",
        layout="folder",
        series="step_#",
        path="step_{}",
        steps={"0": 0, "500": 500, "1000": 1000},
        roles=("model",),
        needed=("model.safetensors",),
        plain=("config.json",),
        others=("step_500/nanoVLM_resumed_0615-101500/step_#",),
        main="model.safetensors",
    ),
    Kind(
        "plain/nested",
        layout="file",
        series="model_step_#.pt",
        path="model_step_{}.pt",
        steps={"100": 100, "200": 200, "300": 300},
        roles=("model", "optimizer", "scheduler", "rng"),
    ),
    Kind(
        "plain/legacy",
        layout="file",
        series="net-#.pth",
        path="net-{}.pth",
        steps={"100": 100, "200": 200, "300": 300},
        roles=("model",),
    ),
]


class TestContract(Contract):
    """Clean, aged, damaged. Clean: a mask of -inf, batch norm, tied weights, an infinite best loss."""


LOADERS = {
    "megatron/ranks": lambda path: {
        "ranks": [rank_state_of(path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt") for rank in (0, 1)]
    },
    "wenet/epochs": lambda path: {"model": torch.load(path, mmap=True)},
    "wenet/steps": lambda path: {"model": torch.load(path, mmap=True)},
    "wenet/converted": lambda path: {"model": torch.load(path / "pytorch_model.bin")},
    "nanovlm/nested": lambda path: {"model": tied(path / "model.safetensors")},
    "plain/nested": lambda path: {"content": torch.load(path)},
    "plain/legacy": lambda path: {"content": torch.load(path)},
}
STEPS_OF_EPOCHS = {0: 40, 1: 80, 2: 120}


def rank_state_of(path):
    """What Megatron takes from a rank's file; its arguments are a Namespace."""
    content = torch.load(path, weights_only=False)
    return {name: content[name] for name in ("model", "optimizer", "opt_param_scheduler")}


def tied(path):
    """nanoVLM's own load: strict, with the tied weight from the header."""
    from safetensors.torch import load_model
    from small_model import Model

    model = Model()
    load_model(model, str(path), strict=True)
    return model.state_dict()


@pytest.mark.parametrize("name", LOADERS)
def test_torch_loads_known_good(name, copied, written, tmp_path):
    """The newest is damaged: what is restored loads, bit for bit as it was saved."""
    from evidence import compare

    [kind] = [kind for kind in KINDS if kind.name == name]
    restored, step = way_back(kind, copied(name), tmp_path / "back")
    if "epoch" in kind.path:
        step = STEPS_OF_EPOCHS[step]
    assert compare(written(name), step, **LOADERS[name](restored)) == []


def test_hallo_resumes_from_known_good(copied, written, tmp_path):
    """The newest is damaged: accelerate and DeepSpeed load what is restored from under ``checkpoints/``."""
    [kind] = [kind for kind in KINDS if kind.name == "hallo/stage1"]
    restored, step = way_back(kind, copied(kind.name), tmp_path / "back")
    BY_KIND["accelerate/deepspeed"].resume(written("accelerate/deepspeed"), restored, step)
