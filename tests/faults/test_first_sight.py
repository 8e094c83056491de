"""What can be known without a digest, and what must not be mistaken for a re-save."""

import json
import os
import random

import pytest
import torch
from support.runs import QUICK, save_file, state_dict, write_sharded, write_torch
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import Selection, verify_target


def small(seed, count, size):
    """A few small matrices."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(size, size, generator=generator) for i in range(count)}


def outcome(target):
    """The outcome of verifying something."""
    return verify_target(str(target), QUICK).outcome


@pytest.mark.parametrize(("count", "size"), [(6, 16), (4, 24), (8, 40)])
@pytest.mark.parametrize("harm", ["page", "half", "scramble"])
def test_harm_to_most_tensors_of_a_small_file_is_no_resave(tmp_path, count, size, harm):
    """Zeroed pages and halves, scrambled bytes, under a new time: BAD, however many tensors they hit."""
    path = tmp_path / "net-500.safetensors"
    save_file(small(1, count, size), path)
    reconcile(look(open_run(str(tmp_path))), PassNotes())
    data = bytearray(path.read_bytes())
    body = 8 + int.from_bytes(data[:8], "little")
    if harm == "page":
        data[-4096:] = bytes(4096)
    elif harm == "half":
        middle = body + (len(data) - body) // 2
        data[middle:] = bytes(len(data) - middle)
    else:
        rng = random.Random(3)
        for at in range(body, len(data)):
            if rng.random() < 0.6:
                data[at] ^= rng.randrange(1, 256)
    path.write_bytes(data)
    assert outcome(tmp_path) is Outcome.BAD


def test_a_resave_with_a_frozen_backbone_is_no_damage(tmp_path):
    """A torch archive vouches for its bytes: two new tensors of fourteen make a new generation."""
    state = {f"frozen.{i}": torch.randn(8, 8) for i in range(12)}
    for seed in (1, 2):
        head = {f"head.{i}": torch.randn(8, 8, generator=torch.Generator().manual_seed(seed + i)) for i in (10, 20)}
        torch.save(state | head, tmp_path / "net-500.pt")
        report = verify_target(str(tmp_path), QUICK)
        assert [(str(c.id), c.outcome) for c in report.checkpoints] == [(f"500.{seed}", Outcome.GOOD)]


def test_a_file_whose_writer_was_killed_ends_in_zeros(tmp_path):
    """safetensors sets the full length first: the tail of zeros is told from weights by the checkpoint before."""
    save_file(small(1, 6, 32), tmp_path / "net-500.safetensors")
    save_file(small(2, 6, 32), tmp_path / "net-1000.safetensors")
    data = (tmp_path / "net-1000.safetensors").read_bytes()
    cut = int(len(data) * 0.4)
    (tmp_path / "net-1000.safetensors").write_bytes(data[:cut] + bytes(len(data) - cut))
    reconcile(look(open_run(str(tmp_path))), PassNotes())
    report = verify_target(str(tmp_path), QUICK, Selection(step=1000))
    assert report.outcome in (Outcome.INCOMPLETE, Outcome.BAD)


def test_a_shard_stands_for_its_checkpoint(tmp_path):
    """Pointing at one file of a checkpoint, or bringing a short checksum list, does not forget the seal."""
    path = tmp_path / write_sharded(tmp_path, 5, seed=1)
    assert outcome(tmp_path) is Outcome.GOOD
    shard = path / "model-00002-of-00003.safetensors"
    info = shard.stat()
    with open(shard, "r+b") as file:
        file.seek(-50, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-50, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(shard, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert outcome(shard) is Outcome.BAD
    sums = tmp_path / "SUMS"
    index = path / "model.safetensors.index.json"
    import hashlib

    sums.write_text(f"{hashlib.md5(index.read_bytes()).hexdigest()}  {index.name}\n")
    assert verify_target(str(path), QUICK, Selection(check_sums=str(sums))).outcome is Outcome.BAD


def test_an_index_that_forgets_a_shard(tmp_path):
    """Loaders would leave its weights random."""
    path = tmp_path / write_sharded(tmp_path, 5, seed=1)
    index = path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    shards = sorted(set(document["weight_map"].values()))
    document["weight_map"] = {k: v for k, v in document["weight_map"].items() if v != shards[1]}
    index.write_text(json.dumps(document))
    assert outcome(path) is Outcome.INCOMPLETE
    document["weight_map"] = {}
    index.write_text(json.dumps(document))
    assert outcome(path) is Outcome.INCOMPLETE


@pytest.mark.parametrize("state", [{}, {"step": 7}, {"w": torch.empty(0)}, [1, 2, 3]])
def test_a_checkpoint_with_nothing_in_it_is_never_good(tmp_path, state):
    """No tensor, no checkpoint."""
    torch.save(state, tmp_path / "net-5.pt")
    assert outcome(tmp_path / "net-5.pt") is Outcome.INCOMPLETE


def test_decimals_are_no_step(tmp_path):
    """best-val_loss=0.35.ckpt is not step 35, and never known-good over step 10."""
    write_torch(tmp_path, 10, seed=1)
    torch.save(state_dict(2), tmp_path / "best-val_loss=0.35.ckpt")
    steps = {c.path: c.step for c in verify_target(str(tmp_path), QUICK).checkpoints}
    assert steps == {"net-10.pt": 10, "best-val_loss=0.35.ckpt": None}


def test_long_names_can_be_recorded(tmp_path):
    """A name whose escaped form would be longer than a file system allows is shortened, and told apart."""
    for name in ("語" * 40, "文" * 40):
        torch.save(state_dict(1), tmp_path / f"{name}-5.pt")
    report = verify_target(str(tmp_path), QUICK)
    assert [c.outcome for c in report.checkpoints] == [Outcome.GOOD] * 2
    assert len({c.series for c in report.checkpoints}) == 2
    assert [str(c.id) for c in verify_target(str(tmp_path), QUICK).checkpoints] == ["5.1", "5.1"]


def test_a_sweep_in_one_run_is_not_one_series(tmp_path):
    """seed0/ and seed1/ have references of their own."""
    for seed, layers in ((0, 4), (1, 3)):
        (tmp_path / f"seed{seed}").mkdir()
        torch.save(state_dict(seed, layers=layers), tmp_path / f"seed{seed}" / "net-5.pt")
    assert outcome(tmp_path) is Outcome.GOOD
