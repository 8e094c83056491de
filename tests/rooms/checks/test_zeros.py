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


def ends_in_zeros(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, of which that is last and zero whose storage a legacy file has at its end."""
    tensors.sort(key=lambda t: str(t.untyped_storage()._cdata))
    tensors[-1].zero_()
    return tensors


@pytest.mark.parametrize("names", [("net", "ema"), ("model", "trainer.swa", "teacher")])
@pytest.mark.parametrize("size", SIZES)
def test_one_layer_under_several_names_is_one(tmp_path: Path, names: tuple[str, ...], size: int) -> None:
    """A zero convolution at the end of a legacy file is no more suspicious for being saved under two names."""
    first, second, last = ends_in_zeros([torch.randn(size, size) for _ in range(3)])
    weights = {"0.weight": first, "1.proj.weight": second, "1.zero_conv.weight": last}
    data = torch_bytes(dict.fromkeys(names, weights), _use_new_zipfile_serialization=False)
    assert [f for f in said(tmp_path, {"n-5.pth": data}) if f.severity is not Severity.NOTICE] == []


@pytest.mark.parametrize("name", ["optimizer", "optim_g", "actor_optimizer", "whatever"])
@pytest.mark.parametrize("moment", ["sum", "exp_avg", "square_avg"])
def test_what_an_optimizer_keeps_is_no_weight(tmp_path: Path, name: str, moment: str) -> None:
    """Moments of an embedding that no batch has used may end a legacy file, whatever the optimizer is called."""
    weight, *moments = ends_in_zeros([torch.randn(6, 6) for _ in range(4)])
    state = {number: {moment: one} for number, one in enumerate(moments)}
    saved = {"model": {"w": weight}, name: {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}}
    data = torch_bytes(saved, _use_new_zipfile_serialization=False)
    assert [f for f in said(tmp_path, {"n-5.pth": data}) if f.severity is not Severity.NOTICE] == []


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("size", SIZES)
def test_several_layers_that_begin_at_zero_may_end_a_legacy_file(tmp_path: Path, count: int, size: int) -> None:
    """Its storages are in the order of addresses, so zero convolutions of a network and of its average may be last.
    Each states its size before it: a writer that was killed would have left no sizes."""
    tensors = sorted([torch.randn(size, size) for _ in range(6)], key=lambda t: str(t.untyped_storage()._cdata))
    for tensor in tensors[-count:]:
        tensor.zero_()
    weights = {f"{'abcdef'[place]}.weight": tensor for place, tensor in enumerate(tensors)}
    data = torch_bytes({"net": weights, "epoch": 3}, _use_new_zipfile_serialization=False)
    assert said(tmp_path, {"n-5.pth": data}) == []
    stored = size * size * 4
    for cut in range(len(data) - count * (stored + 8) - 1, len(data) - stored - 7, 37):
        assert said(tmp_path, {"n-5.pth": data[:cut] + bytes(len(data) - cut)}) != [], cut


def test_a_legacy_file_that_ends_in_zeros_is_never_good(tmp_path: Path) -> None:
    """From anywhere before the size of its last storage on, and from inside of that."""
    rng = random.Random(3)
    for kind in FRESH:
        torch.manual_seed(2)
        weights = {name: t + 0.01 * torch.randn(t.shape) for name, t in FRESH[kind](10).items()}
        data = torch_bytes(weights, _use_new_zipfile_serialization=False)
        last = max(weights.values(), key=lambda t: str(t.untyped_storage()._cdata))
        before_last = len(data) - last.nbytes - 8
        begin = len(data) - sum(t.nbytes + 8 for t in weights.values())
        cuts = [int(rng.uniform(begin, before_last)) for _ in range(20)]
        cuts += [len(data) - last.nbytes // 2] if last.dim() > 1 else []
        for cut in cuts:
            assert said(tmp_path, {"n-5.pth": data[:cut] + bytes(len(data) - cut)}) != [], (kind, cut, len(data))
