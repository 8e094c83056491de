"""Looking at one checkpoint again says what listing the whole run again would say of it."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import fsspec
import pytest
from support.tiny_run import TINY, forget, memory_path
from support.views import look

from ckptguard.layouts import LAYOUTS
from ckptguard.records.manifests import write_manifest
from ckptguard.records.run import Run, begin_run
from ckptguard.runs.run_view import list_run
from ckptguard.values.manifest import File, Manifest

STEPS = (3, 5, 40)
# What writers of each layout leave of a step, and what may lie beside and inside. Names alone decide what it is.
SAVES: dict[str, tuple[str, ...]] = {
    "ckptguard": ("step-{:09d}/model.safetensors", "step-{:09d}/optimizer.safetensors", "step-{:09d}/state.json"),
    "hf-trainer": (
        "checkpoint-{}/model.safetensors",
        "checkpoint-{}/optimizer.pt",
        "checkpoint-{}/trainer_state.json",
        "checkpoint-{}/rng_state.pth",
        "checkpoint-{}/global_step{}/mp_rank_00_model_states.pt",
    ),
    "megatron": ("iter_{:07d}/mp_rank_00/model_optim_rng.pt", "iter_{:07d}/common.pt", "iter_{:07d}/metadata.json"),
    "lightning": ("epoch=1-step={}.ckpt", "logs/version_0/checkpoints/epoch=2-step={}.ckpt"),
    "wenet": ("epoch_{}.pt", "epoch_{}.yaml"),
    "wenet folder": ("step_{}.pt/mp_rank_00_model_states.pt", "step_{}.pt/latest", "step_{}.yaml"),
    "accelerate": (
        "checkpoint_{}/pytorch_model.bin",
        "checkpoint_{}/optimizer.bin",
        "checkpoint_{}/random_states_0.pkl",
    ),
    "deepspeed": (
        "global_step{}/mp_rank_00_model_states.pt",
        "global_step{}/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ),
    "dcp": ("sharded/{}/.metadata", "sharded/{}/__0_0.distcp", "sharded/{}/__1_0.distcp"),
    "folder": ("model-{}/model.safetensors", "model-{}/config.json", "model-{}/evaluation/results.json"),
    "nested": ("model-{}/checkpoint-7/model.safetensors", "model-{}/checkpoint-7/trainer_state.json"),
    "by rank": ("dino/model_{:07d}.rank_0.pth", "dino/model_{:07d}.rank_1.pth", "dino/last_checkpoint.rank_0"),
    "by rank at the top": ("unet_{}_rank0.pt", "unet_{}_rank1.pt"),
    "folder of a rank": ("rank_{}/model.safetensors", "rank_{}/optimizer.pt"),
    "single": ("net-{}.pt", "sub/net-{}.safetensors"),
    "final": ("model.safetensors", "config.json", "model.safetensors.index.json", "pytorch_model.bin"),
}
BESIDE = ("train.yaml", "latest", "README.md", "final.pt", "logs/events.out", ".tmp-x", "tmp-half/model.safetensors")
INSIDE = ("model.safetensors", "README.md", "extra/notes.txt", ".tmp-1", "checkpoint-9/model.safetensors", "latest")


class Place:
    """Where a trainer writes: a folder, or a store."""

    def __init__(self, url: str) -> None:
        self.url, self._memory = url, url.startswith("memory://")

    def write(self, key: str, data: bytes) -> None:
        """A file of this content, unless something that is no file has its name or is in the way."""
        with contextlib.suppress(OSError):
            if self._memory:
                fsspec.filesystem("memory").pipe_file(f"{memory_path(self.url)}/{key}", data)
            else:
                Path(self.url, key).parent.mkdir(parents=True, exist_ok=True)
                Path(self.url, key).write_bytes(data)

    def remove(self, key: str) -> None:
        """No such file any more; folders that are empty go with it. A folder in its place stays."""
        if self._memory:
            fsspec.filesystem("memory").store.pop(f"{memory_path(self.url)}/{key}", None)
            return
        path = Path(self.url, key)
        if path.is_dir():
            return
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            while path.parent != Path(self.url):
                path = path.parent
                path.rmdir()

    def link(self, key: str, target: str) -> None:
        """A link, where there are any."""
        path = Path(self.url, key)
        if not self._memory and path.parent.is_dir() and not os.path.lexists(path):
            path.symlink_to(target)


def fill(place: Place, chance: random.Random) -> None:
    """Saves of some layouts, some of them half-written, and other things beside."""
    for name in chance.sample(sorted(SAVES), chance.randint(2, len(SAVES))):
        for step in chance.sample(STEPS, chance.randint(1, len(STEPS))):
            for key in SAVES[name]:
                if chance.random() < 0.85:
                    place.write(key.format(step, step), chance.randbytes(chance.randrange(40)))
    for key in BESIDE:
        if chance.random() < 0.4:
            place.write(key, b"beside")


def seal(run: Run, chance: random.Random) -> None:
    """Manifests of some of what lies there: what loses its weights is still known by them."""
    for checkpoint in list_run(run).checkpoints.values():
        if chance.random() < 0.6:
            files = (File(path=key, size=1, format="opaque", envelope="") for key in checkpoint.files)
            write_manifest(
                run,
                Manifest(
                    series=checkpoint.series,
                    path=checkpoint.path,
                    layout=checkpoint.layout,
                    step=checkpoint.step,
                    generation=1,
                    digest_origin="observer",
                    sealed_at="",
                    version="",
                    nonce="",
                    files=tuple(files),
                ),
            )


def change(place: Place, run: Run, path: str, chance: random.Random) -> None:
    """Something happens to one checkpoint, under its name and beside it, and to nothing else."""
    own, beside = _own_keys(run, path), _companions(path)
    new = [key if path == "." else f"{path}/{key}" for key in INSIDE if path != "." or "/" not in key]
    for _ in range(chance.randint(1, 3)):
        how = chance.randrange(6)
        if how == 0 and own:
            place.write(chance.choice(own), chance.randbytes(chance.randrange(50)))
        elif how == 1 and own:
            place.remove(chance.choice(own))
        elif how == 2:
            place.write(chance.choice(new), b"new")
        elif how == 3 and beside:
            chance.choice((place.remove, lambda key: place.write(key, b"tag: 1\n")))(chance.choice(beside))
        elif how == 4:
            for key in own:  # rotation, or a crash: what holds weights goes, or all of it
                if chance.random() < 0.5 or key.endswith((".safetensors", ".pt", ".bin", ".ckpt", ".distcp")):
                    place.remove(key)
        elif how == 5 and path != ".":
            place.link(f"{path}/linked.pt", "model.safetensors")


def _own_keys(run: Run, path: str) -> list[str]:
    keys = [e.key for e in list_run(run).entries if e.kind == "file"]
    if path == ".":
        return [key for key in keys if "/" not in key and key in SAVES["final"]]
    held = list_run(run).checkpoints.get(path)
    if held is not None and path in held.files:
        return [key for key in keys if key in held.files]
    return [key for key in keys if key == path or key.startswith(path + "/") or key in _companions(path)]


def _companions(path: str) -> list[str]:
    parent, slash, name = path.rpartition("/")
    beside = {other for row in LAYOUTS.values() for other in row.companions(name, frozenset())} - {name}
    return [parent + slash + other for other in sorted(beside)]


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("seed", range(40))
def test_it_is_as_the_whole_run_listed_again(tmp_path, kind, seed):
    """Whatever happens to one checkpoint of any layout while the others stay as they are."""
    chance = random.Random(seed)
    url = f"memory://again-{tmp_path.name}" if kind == "memory" else str(tmp_path / "run")
    place, run = Place(url), begin_run(url)
    fill(place, chance)
    seal(run, chance)
    paths = sorted(list_run(run).checkpoints)
    for _ in range(6):
        view = look(run, TINY)
        path = chance.choice([*paths, "."])
        before = view.checkpoint(path)
        assert view.look_again(path) == before, "nothing changed"
        change(place, run, path, chance)
        whole = list_run(run)
        assert view.look_again(path) == whole.checkpoints.get(path)
        assert view.entries == whole.entries
        assert {c.path: c for c in view.checkpoints} == whole.checkpoints
    if kind == "memory":
        forget(url)


@pytest.mark.parametrize("seed", range(20))
def test_a_fresh_look_is_as_the_whole_run_listed(tmp_path, seed):
    """Where what was sealed says how a series is read, one checkpoint alone is read as among all the others."""
    chance = random.Random(seed)
    place, run = Place(str(tmp_path)), begin_run(str(tmp_path))
    fill(place, chance)
    seal(run, chance)
    for _ in range(3):
        paths = sorted(list_run(run).checkpoints)
        change(place, run, chance.choice([*paths, "."]), chance)
        whole = list_run(run).checkpoints
        for path in {*paths, *whole}:
            assert look(run, TINY).look_again(path) == whole.get(path)
            assert look(run, TINY).holding(path) == next(
                (c for c in whole.values() if path == c.path or path in c.files), None
            )


def test_a_sealed_folder_that_lost_its_weights_is_still_one(tmp_path):
    """No layout would take it for a checkpoint any more; its manifest does."""
    place, run = Place(str(tmp_path)), begin_run(str(tmp_path))
    for key in SAVES["folder"]:
        place.write(key.format(5), b"x")
    chance = random.Random(0)
    while look(run, TINY).history.sealed("model-#") == set():
        seal(run, chance)
    view = look(run, TINY)
    assert view.checkpoint("model-5") is not None
    place.remove("model-5/model.safetensors")
    again = view.look_again("model-5")
    assert again is not None
    assert again.files == ("model-5/config.json", "model-5/evaluation/results.json")
    assert again == list_run(run).checkpoints["model-5"]


def test_every_layout_is_among_them(tmp_path):
    """A new layout has to be added here."""
    place, found = Place(str(tmp_path)), set()
    for keys in SAVES.values():
        for key in keys:
            place.write(key.format(5, 5), b"x")
    (tmp_path / "train.yaml").write_text("")
    for checkpoint in list_run(begin_run(str(tmp_path))).checkpoints.values():
        found.add(checkpoint.layout)
    assert found == LAYOUTS.keys() - {"hub-cache"}  # of downloads, which are no saves
