"""`load` refuses what is not good, and never gives bytes that were not judged."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded_states import by_torch, same
from support.damage import appended_bytes, bit_flip, missing_shard, stale_shard, truncation, zeroed_page
from support.layouts import WRITERS, moments, sharded, weights, write_trainer
from support.runs import write_torch

import ckptguard
from ckptguard.api import held_bytes, load
from ckptguard.errors import CkptguardError, CouldNotTellError, NoKnownGoodError, RefusedError, StateError
from ckptguard.keep.copies import keep_checkpoint
from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import open_run
from ckptguard.runs.run_view import open_view
from ckptguard.scan.files import scan_files
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings


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
    assert str(three) in (caught.value.hint or "")


def test_a_sparse_file_of_any_size_takes_no_memory(root: Path) -> None:
    """A file that is larger than the machine's memory is refused before it is read."""
    with open(root / "huge.pt", "wb") as file:
        file.truncate(1 << 43)  # ext4 holds no larger one
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


def test_what_one_rank_saved_by_itself_is_not_taken_for_all(root: Path) -> None:
    """Without collectives each rank describes its own pieces alone: the rest would be whatever was in memory."""
    sharded(root / "step-1", {"model": weights(3)})
    folder = root / "step-1"
    (folder / ".metadata").rename(folder / "__0.metadata")
    with pytest.raises(CkptguardError):
        ckptguard.load(folder)


def test_a_target_that_turns_into_another_thing_is_not_an_empty_state(root: Path, monkeypatch) -> None:
    """It becomes part of a run with records between two looks: an error, and never a state without tensors."""
    path = root / write_torch(root, 1, seed=1)
    real = load.verify_target

    def sealed_meanwhile(*arguments: Any, **how: Any) -> Any:
        ckptguard.seal(path, run=root.parent)
        return real(*arguments, **how)

    monkeypatch.setattr(load, "verify_target", sealed_meanwhile)
    with pytest.raises(CouldNotTellError):
        ckptguard.load(path)


def npy(array: np.ndarray) -> bytes:
    """One of numpy's files."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("hidden", ["w", "w.npy.npy"])
def test_an_array_behind_another_record_of_its_name_is_an_error(root: Path, hidden: str) -> None:
    """numpy would give the one record under the name of the other, and the array that was judged would be lost."""
    with zipfile.ZipFile(root / "model.npz", "w") as archive:
        archive.writestr("w.npy", npy(np.arange(3.0)))
        archive.writestr(hidden, npy(np.ones(3)))
    with pytest.raises(StateError, match="two records"):
        ckptguard.load(root / "model.npz")


def test_a_shard_that_is_a_list_is_an_error_of_the_tree(root: Path) -> None:
    """Its tensors have names of numbers, which an index may state."""
    folder, shard = root / "download", "pytorch_model-00001-of-00001.bin"
    folder.mkdir()
    torch.save([torch.ones(3)], folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"0": shard}}))
    with pytest.raises(StateError, match=shard):
        ckptguard.load(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there_is_an_error_of_the_tree(root: Path) -> None:
    """Also for the tensors of a distributed checkpoint, which are put there when they are whole."""
    sharded(root / "step-1", {"model": weights(3)})
    with pytest.raises(StateError, match="torch does not load it"):
        ckptguard.load(root / "step-1", map_location="cuda")


def test_a_guards_state_whose_model_is_no_dict_is_an_error_of_the_tree(root: Path) -> None:
    """Its file is JSON in the right format, and the weights are beside it."""
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    with ckptguard.TrainingGuard(root, model=layer, optimizer=optimizer, daemon="off") as guard:
        guard.save(1)
    folder = root.parent / "elsewhere" / "step-000000001"
    shutil.copytree(root / folder.name, folder)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "model": [1]}))
    with pytest.raises(CkptguardError, match="no dict"):
        ckptguard.load(folder)
