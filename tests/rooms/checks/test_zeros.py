"""Zeros that nothing wrote are never good; layers that begin at zero always are."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from support.format_files import torch_bytes
from support.judged_files import findings_of
from torch import nn

from ckptguard.values.verdict import Finding, Severity

SIZES = (6, 10)
Weights = dict[str, torch.Tensor]


class Residual(nn.Module):
    """A block with a gain that begins at zero, as ReZero, LayerScale and NormFormer have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.mlp, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.zeros(width))


class AdaLn(nn.Module):
    """A block of a diffusion transformer, whose modulation begins at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.modulation = nn.Linear(width, width), nn.Linear(width, 2 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)


class Adapted(nn.Module):
    """A layer with an adapter whose second half begins at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.lora_A, self.lora_B = nn.Linear(width, width), nn.Linear(width, 2), nn.Linear(2, width)
        nn.init.zeros_(self.lora_B.weight)


class Controlled(nn.Module):
    """A network, and the zero convolutions that connect it to another one, at its end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 3) for _ in range(6))
        self.zero_convs = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(6))
        for conv in self.zero_convs:
            nn.init.zeros_(conv.weight)
            nn.init.zeros_(conv.bias)


def halves(width: int) -> Weights:
    """An adapter alone, which lists its first halves before its second ones."""
    found = {f"lora.A.{n}": torch.randn(2, width) for n in range(4)}
    return found | {f"lora.B.{n}": torch.zeros(width, 2) for n in range(4)}


def stack(kind: Callable[[int], nn.Module], width: int) -> Weights:
    """Some blocks of a kind between an embedding and a head whose bias begins at zero."""
    head = nn.Linear(width, 5)
    nn.init.zeros_(head.bias)
    body = nn.ModuleList(kind(width) for _ in range(4))
    net = nn.ModuleDict({"embed": nn.Embedding(9, width), "layers": body, "norm": nn.LayerNorm(width), "out": head})
    return net.state_dict()


FRESH: dict[str, Callable[[int], Weights]] = {
    "residual gains": lambda width: stack(Residual, width),
    "modulation": lambda width: stack(AdaLn, width),
    "LoRA": lambda width: stack(Adapted, width),
    "zero convolutions": lambda width: Controlled(width).state_dict(),
    "halves of an adapter": halves,
    "plain": lambda width: stack(lambda w: nn.Linear(w, w), width),
}


INTACT = {("zero convolutions", 2): "model-00002", ("zero convolutions", 3): "model-00003"}


def shards(weights: Weights, count: int) -> dict[str, bytes]:
    """The files of a sharded model, with their index."""
    names, files, index = list(weights), dict[str, bytes](), dict[str, str]()
    for number in range(count):
        own = names[number * len(names) // count : (number + 1) * len(names) // count]
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        files[file] = save({name: weights[name].contiguous() for name in own})
        index |= dict.fromkeys(own, file)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": index}).encode()
    return files


def said(folder: Path, files: dict[str, bytes]) -> list[Finding]:
    """What keeps these files from being good."""
    found = findings_of(folder, files)
    return [f for f in found if f.severity in (Severity.ERROR, Severity.SICKNESS)]


def start_of_data(data: bytes) -> int:
    """Where a safetensors file's tensors begin."""
    return 8 + int.from_bytes(data[:8], "little")


@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize("width", SIZES)
def test_layers_that_begin_at_zero_are_good(tmp_path: Path, kind: str, width: int) -> None:
    """In one file of any format, and in shards of any size, fresh and after training moved everything."""
    for seed in range(3):
        torch.manual_seed(seed)
        weights = FRESH[kind](width)
        moved = {name: t + 0.01 * torch.randn(t.shape) for name, t in weights.items()}
        for state in (weights, moved):
            assert said(tmp_path, {"model.safetensors": save(state)}) == []
            for zipped in (True, False):
                assert said(tmp_path, {"net-5.pt": torch_bytes(state, _use_new_zipfile_serialization=zipped)}) == []
            for count in (2, 3, 5):
                assert said(tmp_path, shards(state, count)) == [], (kind, seed, count)


@pytest.mark.parametrize("kind", [kind for kind in FRESH if kind != "halves of an adapter"])
@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_a_shard_that_ends_in_zeros_is_never_good(tmp_path: Path, kind: str, share: float) -> None:
    """Each shard of a model in turn, from its middle, its first tenth or its start on."""
    torch.manual_seed(1)
    weights = FRESH[kind](10)
    for count in (2, 3):
        files = shards(weights, count)
        for name in [name for name in files if name.endswith("safetensors")]:
            data = files[name]
            cut = len(data) - int(share * (len(data) - start_of_data(data)))
            damaged = files | {name: data[:cut] + bytes(len(data) - cut)}
            if name.startswith(INTACT.get((kind, count), "?")):
                continue  # it holds nothing but zeros as it is
            assert said(tmp_path, damaged) != [], (kind, share, count, name)


@pytest.mark.parametrize("kind", [kind for kind in FRESH if kind != "halves of an adapter"])
def test_one_file_that_ends_in_zeros_is_never_good(tmp_path: Path, kind: str) -> None:
    """Cut at any place before the last two matrices that were not zero."""
    rng = random.Random(7)
    torch.manual_seed(2)
    weights = {name: t + 0.01 * torch.randn(t.shape) for name, t in FRESH[kind](10).items()}
    data = save(weights)
    begin = start_of_data(data)
    missed = []
    for _ in range(25):
        cut = begin + int(rng.uniform(0, 0.6) * (len(data) - begin))
        if not said(tmp_path, {"model.safetensors": data[:cut] + bytes(len(data) - cut)}):
            missed.append((cut - begin) / (len(data) - begin))
    assert missed == []


def test_flat_parameters_that_are_all_zero_are_never_good(tmp_path: Path) -> None:
    """Those of FSDP1 and of ZeRO-3, which keeps the weights in its optimizer's files; with values they are good."""
    for value, good in ((torch.zeros(64), False), (torch.linspace(-1, 1, 64), True)):
        flat = {"model": {"_fsdp_wrapped_module.flat_param": value, "norm.flat_param": value}}
        assert (said(tmp_path, {"net-5.pt": torch_bytes(flat)}) == []) is good
        group = {"fp32_flat_groups": [value], "optimizer_state_dict": {"state": {0: {"exp_avg": torch.zeros(64)}}}}
        name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        assert (said(tmp_path, {name: torch_bytes({"optimizer_state_dict": group})}) == []) is good


def test_the_doubt_says_what_to_do(tmp_path: Path) -> None:
    """It names the file, what may have happened, and the command that clears it."""
    files = shards(FRESH["plain"](8), 2)
    name = "model-00002-of-00002.safetensors"
    data = files[name]
    begin = start_of_data(data)
    [finding] = said(tmp_path, files | {name: data[:begin] + bytes(len(data) - begin)})
    assert (finding.check, finding.severity, finding.file) == ("zeros", Severity.SICKNESS, name)
    assert "ckptguard clear" in finding.message
