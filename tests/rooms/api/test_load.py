"""`load` gives what torch.load gives, of every layout and format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from loaded_states import by_torch, ordered, same
from support.hub_caches import Hub, sharded_files
from support.layouts import WRITERS, optimizer_tensors, sharded, weights
from support.runs import state_dict, write_sharded, write_torch

import ckptguard
from ckptguard.errors import CkptguardError, SettingsError

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 6), reason="ckptguard.load refuses this torch")


def test_a_torch_that_a_file_can_make_run_code_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.6, `weights_only` is no protection: nothing is loaded, and it is said what to install."""
    path = root / WRITERS["torch"](root, 5, 1)
    for version in ("1.13.1", "2.4.0", "2.5.1+cu121"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(SettingsError, match="can be made to run code") as refused:
            ckptguard.load(path)
        assert refused.value.hint == "install torch 2.6"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["torch", "legacy", "every-float", "lightning", "wenet"])
def test_one_file_gives_what_torch_load_gives(root: Path, kind: str) -> None:
    """Stray, and as the newest known-good checkpoint of a run."""
    path = root / WRITERS[kind](root, 5, 1)
    assert same(ckptguard.load(path), by_torch(path))
    ckptguard.verify(root)
    assert same(ckptguard.load(root), by_torch(path))


@pytest.mark.parametrize("kind", sorted(set(WRITERS) - {"torch", "legacy", "every-float", "lightning", "wenet", "npz"}))
def test_a_folder_gives_its_parts(root: Path, kind: str) -> None:
    """Every torch file of every layout is in it, as torch loads it; the weights of all that have some, too."""
    path = root / WRITERS[kind](root, 5, 1)
    ckptguard.verify(root)
    state = ckptguard.load(path)
    assert same(state, ckptguard.load(root))
    for file in (p for p in path.rglob("*") if p.suffix in (".pt", ".pth", ".bin") or p.name.startswith("random_")):
        inside = str(file.relative_to(path).with_suffix("")).replace("pytorch_model.bin", "model")
        assert same(state[inside], by_torch(file)), file
    if (path / "model.safetensors").exists():
        assert same(ordered(state["model"]), ordered(weights(1) if kind != "safetensors" else state_dict(1)))
    if kind == "sharded":
        assert same(ordered(state["model"]), ordered(state_dict(1)))
    if kind in ("dcp", "lightning-sharded"):
        model = state["model" if kind == "dcp" else "state_dict"]
        assert same(ordered(model), ordered(weights(1)))
    if kind == "accelerate-fsdp":
        assert same(ordered(state["pytorch_model_fsdp_0"]["model"]), ordered(weights(1)))
        assert same(ordered(state["optimizer_0"]["optimizer"]), ordered(optimizer_tensors(1)))
    if kind == "trainer":
        assert state["trainer_state"]["global_step"] == 5


def test_pieces_of_a_distributed_tensor_are_put_together(root: Path) -> None:
    """What several ranks would have saved in pieces, and a number and text beside it."""
    state = {"model": {"w": torch.arange(60.0).reshape(6, 10)}, "step": 7, "note": "text"}
    sharded(root / "step-1", state)
    found = ckptguard.load(root / "step-1")
    assert torch.equal(found["model"]["w"], state["model"]["w"])  # type: ignore[index]
    assert (found["step"], found["note"]) == (7, "text")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_safetensors_of_every_shape_and_type(root: Path, shape: tuple[int, ...], dtype: str) -> None:
    """As the reference implementation reads them; what is loaded is writable, and shares nothing."""
    from safetensors.torch import load_file, save_file

    made = torch.rand(shape).mul(3).to(getattr(torch, dtype))
    save_file({"a": made, "odd": torch.ones(3, dtype=torch.uint8), "b": made.clone()}, root / "model.safetensors")
    found = ckptguard.load(root / "model.safetensors")
    assert same(ordered(found), ordered(load_file(root / "model.safetensors")))
    found["a"].zero_()
    assert same(found["b"], made)
    assert found["a"].untyped_storage().nbytes() == made.nbytes


def test_a_guards_checkpoint_gives_its_state_dicts(root: Path) -> None:
    """Model and optimizer load into fresh ones, and the step is there."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    guard = ckptguard.TrainingGuard(
        root, model=model, optimizer=optimizer, scheduler=scheduler, daemon="off", settings={"settle": 0}
    )
    for step, batch in guard.steps([torch.randn(8, 40) for _ in range(4)], total=4, save_every=2):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        guard.observe(loss=loss)
        assert step
    guard.close()
    state = ckptguard.load(root)
    assert state["step"] == 4
    assert same(ordered(state["model"]), ordered(model.state_dict()))
    assert same(state["optimizer"], optimizer.state_dict())
    assert state["scheduler"] == scheduler.state_dict()
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(state["optimizer"])
    one = Path(ckptguard.known_good(root).path) / "model.safetensors"
    assert same(ordered(ckptguard.load(one)), ordered(model.state_dict()))


def test_arrays_are_numpys(root: Path) -> None:
    """An archive of arrays, and one array."""
    path = root / WRITERS["npz"](root, 5, 1)
    assert same(ordered(ckptguard.load(path)), ordered({n: t.numpy() for n, t in weights(1).items()}))
    np.save(root / "model.npy", np.arange(12.0))
    assert same(ckptguard.load(root / "model.npy"), np.arange(12.0))


def test_a_download_in_the_hubs_cache_is_loaded(tmp_path: Path, root: Path) -> None:
    """One snapshot by its path, also one file of it; a repository holds several downloads and is none."""
    hub = Hub(tmp_path / "hub")
    snapshot = hub.download(sharded_files())
    state = ckptguard.load(snapshot)
    assert set(state["model"]) == set(json.loads((snapshot / "model.safetensors.index.json").read_text())["weight_map"])
    shard = next(p for p in snapshot.iterdir() if p.suffix == ".safetensors")
    assert set(ckptguard.load(shard)) < set(state["model"])
    with pytest.raises(CkptguardError):
        ckptguard.load(hub.repository())


def test_shards_of_a_download_are_one_model(root: Path) -> None:
    """A folder outside of any run."""
    folder = root / write_sharded(root, 1, seed=4)
    shutil.move(folder, root.parent / "download")
    assert same(ordered(ckptguard.load(root.parent / "download")["model"]), ordered(state_dict(4)))


def test_shards_that_two_indexes_name_are_one_model(root: Path) -> None:
    """A copy of the index under another name adds no part; an index of some of the shards has a part of its own."""
    folder = root / write_sharded(root, 1, seed=4)
    index = folder / "model.safetensors.index.json"
    shutil.copy(index, folder / "model.fp16.safetensors.index.json")
    shutil.move(folder, root.parent / "download")
    state = ckptguard.load(root.parent / "download")
    models = [part for name, part in state.items() if name.startswith("model")]
    assert len(models) == 1
    assert same(ordered(models[0]), ordered(state_dict(4)))


def test_names_with_dots_in_a_distributed_checkpoint_stay_whole(root: Path) -> None:
    """A flat state dict of names with dots, without a container around it."""
    state = dict(weights(3))
    sharded(root / "step-1", state)
    assert same(ordered(ckptguard.load(root / "step-1")), ordered(state))


def test_memory_holds_a_checkpoint_twice_and_no_more(root: Path) -> None:
    """What was loaded of a folder is let go before the next file is, and no copy of the bytes is made for torch."""
    import tracemalloc

    folder = root / "checkpoint-1"
    folder.mkdir()
    for name in ("model.pt", "optimizer.pt", "ema.pt"):
        torch.save({"w": torch.randn(1 << 22)}, folder / name)
    total = sum(p.stat().st_size for p in folder.iterdir())
    ckptguard.load(folder)  # what is imported and remembered is so now
    tracemalloc.start()
    try:
        ckptguard.load(folder)
        peak = tracemalloc.get_traced_memory()[1]  # of Python's memory; torch's own is not counted
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * total


def test_tensors_are_put_on_the_device_that_is_named(root: Path) -> None:
    """Of safetensors and of torch's own; `meta` is the one other device that every machine has."""
    folder = root / WRITERS["safetensors"](root, 1, 1)
    assert all(t.device.type == "meta" for t in ckptguard.load(folder, map_location="meta")["model"].values())
    path = root / write_torch(root, 2, seed=1)
    assert all(t.device.type == "meta" for t in ckptguard.load(path, map_location=torch.device("meta")).values())
    assert same(ckptguard.load(path, map_location="cpu:0"), ckptguard.load(path))
