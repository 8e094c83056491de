"""Hugging Face's Trainer, as the installed one writes it, damaged, and resumed by it."""

import pytest
from contract import FULL, Contract, Kind, way_back
from groups import BY_KIND

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.writers, pytest.mark.torch, pytest.mark.timeout(400)]

PLAIN = ("*.md", "*.py", "*config.json", "training_args.bin", "latest")
USUAL = {"layout": "hf-trainer", "series": "checkpoint-#", "path": "checkpoint-{}", "steps": {"2": 2, "4": 4, "6": 6}}
USUAL |= {"roles": FULL, "plain": PLAIN}
STATE = ("trainer_state.json",)
KINDS = [
    Kind("hf_trainer/single", needed=("model.safetensors", *STATE), main="model.safetensors", **USUAL),
    Kind("hf_trainer/sharded", needed=("model*", *STATE), main="model-00002-of-00004.safetensors", **USUAL),
    Kind("hf_trainer/lora", needed=("adapter*", *STATE), main="adapter_model.safetensors", **USUAL),
    Kind("hf_trainer/ddp", needed=("model.safetensors", *STATE), main="optimizer.pt", **USUAL),
    Kind(
        "hf_trainer/deepspeed",
        needed=("*_states.pt", "latest", *STATE),
        main="global_step{0}/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        **USUAL,
    ),
]


class TestContract(Contract):
    """Clean, aged, damaged."""


@pytest.mark.parametrize("kinds", [KINDS[:3], KINDS[3:4], KINDS[4:]], ids=["one-process", "ddp", "deepspeed"])
def test_the_trainer_resumes_from_known_good(kinds, copied, written, tmp_path):
    """The newest is damaged: what is restored is resumed by the Trainer itself, bit for bit as it was saved."""
    arguments = []
    for kind in kinds:
        restored, _ = way_back(kind, copied(kind.name), tmp_path / "back" / kind.name.partition("/")[2])
        arguments += [written(kind.name), restored]
    BY_KIND[kinds[0].name].resume(*arguments)
