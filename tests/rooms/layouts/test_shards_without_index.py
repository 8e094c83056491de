"""An index is required where the reader of these names needs one, and nowhere else."""

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file
from support.views import look

from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome
from ckptguard.verification.collect_evidence import unfinished_because

NEEDED = {("model", "safetensors"), ("pytorch_model", "bin"), ("diffusion_pytorch_model", "safetensors")}
STEMS = [*sorted(NEEDED), ("model", "bin"), ("ft-model", "safetensors"), ("hf_model", "bin")]
CASES = [
    (stem, suffix, total, lost, index)
    for (stem, suffix), total, index in itertools.product(STEMS, (1, 2, 4), (True, False))
    for lost in (None, *range(total if total > 1 else 0))
]


@pytest.mark.parametrize(("stem", "suffix", "total", "lost", "index"), CASES)
def test_shards_are_whole_if_their_reader_can_read_them(root, stem, suffix, total, lost, index):
    """All shards by their own count make a model whole; the index is needed for the names that are read by it."""
    place, weight_map = root / "epoch_1", {}
    place.mkdir()
    for number in range(total):
        shard = f"{stem}-{number + 1:05d}-of-{total:05d}.{suffix}"
        state = {f"layers.{number}.weight": torch.randn(8, 8)}
        weight_map |= dict.fromkeys(state, shard)
        if number != lost:
            (save_file if suffix == "safetensors" else torch.save)(state, place / shard)
    if index:
        (place / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole = lost is None and (index or total == 1 or (stem, suffix) not in NEEDED)
    view = look(str(root))
    assert (unfinished_because(view.run.storage, view.checkpoint("epoch_1")) is None) is whole


def test_transformers_needs_the_index_of_several_shards(tmp_path):
    """What is called unfinished here is what the real loader refuses."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
        )
    )
    place = tmp_path / "run" / "checkpoint-1"
    model.save_pretrained(place, max_shard_size="8KB")
    assert len(list(place.glob("model-*-of-*.safetensors"))) > 1
    load = transformers.LlamaForCausalLM.from_pretrained
    for index in (True, False):
        if not index:
            (place / "model.safetensors.index.json").unlink()
        view = look(str(tmp_path / "run"))
        said = unfinished_because(view.run.storage, view.checkpoint("checkpoint-1"))
        if index:
            load(place)
            assert said is None
        else:
            with pytest.raises(OSError, match="safetensors"):
                load(place)
            assert "no index" in said


def test_one_numbered_file_without_an_index_is_good(root):
    """torchtune's ``model-00001-of-00001.bin`` becomes good and known-good."""
    place = root / "epoch_1"
    place.mkdir()
    torch.save({"layers.0.weight": torch.randn(8, 8)}, place / "model-00001-of-00001.bin")
    checked = reconcile(look(str(root)), PassNotes()).checked
    assert [(c.path, c.outcome) for c in checked] == [("epoch_1", Outcome.GOOD)]
