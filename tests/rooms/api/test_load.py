"""`load` gives what torch.load gives of good bytes, refuses all others, and never gives bytes that were not judged."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.damage import appended_bytes, bit_flip, missing_shard, stale_shard, truncation, zeroed_page
from support.hub_caches import Hub, sharded_files
from support.layouts import WRITERS, moments, optimizer_tensors, sharded, weights, write_trainer
from support.runs import state_dict, write_sharded, write_torch

import ckptguard
from ckptguard.api import held_bytes
from ckptguard.errors import CkptguardError, CouldNotTellError, NoKnownGoodError, RefusedError, StateError
from ckptguard.keep.copies import keep_checkpoint
from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import open_run
from ckptguard.runs.run_view import open_view
from ckptguard.scan.files import scan_files
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings


def same(a: Any, b: Any) -> bool:
    """Whether two states hold the same values of the same types."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and (a.is_quantized or bits(a) == bits(b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or vars(a) == vars(b) if hasattr(a, "__dict__") else a == b)


def bits(tensor: torch.Tensor) -> tuple[torch.Size, bytes]:
    """Shape and bytes, for NaN is not equal to itself."""
    return tensor.shape, bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def by_torch(path: Path) -> Any:
    """What torch itself loads; only of files that the test has written."""
    return torch.load(path, weights_only=False)


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


def ordered(state: Mapping[str, Any]) -> dict[str, Any]:
    """By name."""
    return {name: state[name] for name in sorted(state)}


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


@pytest.mark.parametrize(
    "harm", [bit_flip, zeroed_page, truncation, appended_bytes, missing_shard, stale_shard], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("kind", ["trainer", "sharded", "torch", "dcp"])
def test_what_was_harmed_is_refused_and_an_older_one_is_loaded(root: Path, kind: str, harm: Callable[..., Any]) -> None:
    """Whatever was done to a sealed checkpoint: it is never loaded, and the run gives the one before."""
    paths = [WRITERS[kind](root, step, step) for step in (100, 200)]
    ckptguard.verify(root)
    before = ckptguard.load(root, step=100)
    record = open_run(str(root))
    series = next(s.series for s in ckptguard.checkpoints(root))
    manifest = read_manifest(record, CheckpointId(series, 200, 1))
    if manifest is None or harm(root, manifest, random.Random(3)) is None:
        pytest.skip("there is nothing of that kind to harm")
    with pytest.raises(CkptguardError) as refused:
        ckptguard.load(root / paths[1])
    assert getattr(refused.value, "outcome", "") != "good"
    shutil.rmtree(root / "_ckptguard" / "kept", ignore_errors=True)
    assert same(ckptguard.load(root), before)


def test_a_whole_kept_copy_is_loaded_where_the_place_is_damaged(verified: Path, flip) -> None:
    """The newest checkpoint from its protected copy, under its own name; a copy that is harmed too counts no more."""
    right = by_torch(verified / "net-300.pt")
    view = open_view(str(verified), Settings(keep="copy"))
    checkpoint = view.checkpoint("net-300.pt")
    assert checkpoint is not None
    id = view.current(checkpoint)
    assert id is not None
    keep_checkpoint(view, checkpoint, id)
    flip(verified / "net-300.pt")
    assert same(ckptguard.load(verified), right)
    (copy,) = [p for p in (verified / "_ckptguard" / "kept").rglob("*") if p.is_file() and p.stat().st_size > 10000]
    flip(copy)
    assert same(ckptguard.load(verified), by_torch(verified / "net-200.pt"))


def test_a_file_swapped_after_it_was_read_changes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment after the scan, before anything is loaded, another whole file takes its place."""
    path, other = root / write_torch(root, 1, seed=1), root.parent / write_torch(root.parent, 2, seed=2)
    right = by_torch(path)

    def scan_and_swap(*arguments: Any) -> Any:
        scan = scan_files(*arguments)
        shutil.copy(other, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
        return scan

    monkeypatch.setattr("ckptguard.scan.files.scan_files", scan_and_swap)
    assert same(ckptguard.load(path), right)
    assert not same(by_torch(path), right)


def test_bytes_that_change_between_two_reads_of_them_are_never_mixed(root: Path, monkeypatch) -> None:
    """After its first read of a file the scan sees what was read, although the file was overwritten in place."""
    path, other = root / write_torch(root, 1, seed=1), root.parent / write_torch(root.parent, 2, seed=2)
    right = by_torch(path)
    whole = held_bytes._whole

    def read_and_overwrite(storage: Any, reader: Any) -> bytearray:
        data = whole(storage, reader)
        path.write_bytes(other.read_bytes())
        return data

    monkeypatch.setattr(held_bytes, "_whole", read_and_overwrite)
    assert same(ckptguard.load(path), right)
    assert path.read_bytes() == other.read_bytes()


def test_a_file_that_changes_while_it_is_read_is_not_loaded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the old nor the new, nor a mixture: it could not be told what it is."""
    path, other = root / write_torch(root, 1, seed=1), root.parent / write_torch(root.parent, 2, seed=2)
    from ckptguard.storage.local.local_storage import LocalStorage

    opened = LocalStorage.open

    def open_and_swap(self: LocalStorage, key: str) -> Any:
        reader = opened(self, key)
        if key.endswith(path.name):
            path.write_bytes(other.read_bytes())
        return reader

    monkeypatch.setattr(LocalStorage, "open", open_and_swap)
    with pytest.raises(CouldNotTellError):
        ckptguard.load(path)


def test_in_a_run_what_was_swapped_is_not_taken_for_what_was_sealed(verified: Path, monkeypatch) -> None:
    """A whole file of another step, put there between two looks: the run gives only what its records vouch for."""
    newest, oldest = verified / "net-300.pt", verified / "net-100.pt"
    sealed = [by_torch(p) for p in (verified / "net-300.pt", verified / "net-200.pt", oldest)]

    def scan_and_swap(*arguments: Any) -> Any:
        scan = scan_files(*arguments)
        newest.write_bytes(oldest.read_bytes())
        return scan

    monkeypatch.setattr("ckptguard.scan.files.scan_files", scan_and_swap)
    found = ckptguard.load(verified)
    assert same(found, sealed[0]) or same(found, sealed[1])


class Armed:
    """Unpickling one of these makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("trusted", [False, True])
def test_nothing_that_a_file_names_is_run(root: Path, trusted: bool) -> None:
    """An armed pickle is bad; and where its user trusts the name for verification, torch still does not call it."""
    mark = root.parent / "was-run"
    torch.save({"w": torch.ones(5), "x": Armed(str(mark))}, root / "armed.pt")
    settings = {"trust_globals": ["pathlib.Path.touch", "pathlib.PosixPath", "builtins.getattr", "pathlib.Path"]}
    with pytest.raises((RefusedError, StateError)):
        ckptguard.load(root / "armed.pt", settings=settings if trusted else None)
    (root / "plain.pkl").write_bytes(pickle.dumps(Armed(str(mark))))
    with pytest.raises(CkptguardError):
        ckptguard.load(root / "plain.pkl", settings=settings if trusted else None)
    assert not mark.exists()


def test_a_sick_checkpoint_is_loaded_only_if_it_is_asked_for(verified: Path) -> None:
    """SUSPECT is refused, and the error says how it is had; BAD is refused whatever is asked."""
    path = verified / "net-300.pt"
    view = open_view(str(verified), Settings())
    checkpoint = view.checkpoint(path.name)
    assert checkpoint is not None
    id = view.current(checkpoint)
    assert id is not None
    mark_suspect(view, id, "training turned sick")
    with pytest.raises(RefusedError) as refused:
        ckptguard.load(path)
    assert (refused.value.outcome, "allow_suspect=True" in (refused.value.hint or "")) == ("suspect", True)
    assert same(ckptguard.load(path, allow_suspect=True), by_torch(path))
    assert same(ckptguard.load(verified), by_torch(verified / "net-200.pt"))
    torch.save({"w": torch.full((64, 64), float("nan"))}, verified.parent / "nan.pt")
    with pytest.raises(RefusedError) as refused:
        ckptguard.load(verified.parent / "nan.pt", allow_suspect=True)
    assert refused.value.outcome == "bad"


def test_a_run_without_a_verdict_says_what_to_do(three: Path) -> None:
    """Nothing is known-good before it was verified."""
    with pytest.raises(NoKnownGoodError) as caught:
        ckptguard.load(three)
    assert "ckptguard verify" in (caught.value.hint or "")


def test_a_sparse_file_of_any_size_takes_no_memory(root: Path) -> None:
    """A file that is larger than the machine's memory is refused before it is read."""
    with open(root / "huge.pt", "wb") as file:
        file.truncate(1 << 50)
    with pytest.raises(CouldNotTellError, match="memory"):
        ckptguard.load(root / "huge.pt")


def test_what_torch_does_not_load_without_code_is_an_error_of_the_tree(root: Path) -> None:
    """A folder with a class of the user's own beside the weights: the message names the file."""
    name = write_trainer(root, 5, 1)
    torch.save({"state": moments(1), "own": torch.nn.Linear(2, 2)}, root / name / "optimizer.pt")
    ckptguard.verify(root)
    with pytest.raises((StateError, RefusedError)) as caught:
        ckptguard.load(root / name)
    assert "optimizer.pt" in caught.value.message


def test_shards_of_a_download_are_one_model(root: Path) -> None:
    """A folder outside of any run."""
    folder = root / write_sharded(root, 1, seed=4)
    shutil.move(folder, root.parent / "download")
    assert same(ordered(ckptguard.load(root.parent / "download")["model"]), ordered(state_dict(4)))


def test_tensors_are_put_on_the_device_that_is_named(root: Path) -> None:
    """Of safetensors and of torch's own; `meta` is the one other device that every machine has."""
    folder = root / WRITERS["safetensors"](root, 1, 1)
    assert all(t.device.type == "meta" for t in ckptguard.load(folder, map_location="meta")["model"].values())
    path = root / write_torch(root, 2, seed=1)
    assert all(t.device.type == "meta" for t in ckptguard.load(path, map_location=torch.device("meta")).values())
