"""Which folders of a fleet are its runs."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_files import content
from support.tiny_run import save

from ckptguard.errors import NotFoundError
from ckptguard.fleet import Discovery, find_runs, read_fleet
from ckptguard.fleet import search as searching
from ckptguard.records.run import begin_run, create_record
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.values.settings import Settings

PLAIN = Settings()


def put(root: Path, *names: str) -> None:
    """Write files; a name that ends in a slash is an empty folder."""
    for name in names:
        place = root / name
        if name.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content(1)["model.safetensors"])


def found(root: Path | str) -> list[str]:
    """The names of the runs of a fleet without trouble."""
    fleet = find_runs(str(root), PLAIN)
    assert fleet.troubles == ()
    return [run.name for run in fleet.runs]


def give_records(run: Path) -> None:
    """Let ckptguard have written in this run."""
    create_record(begin_run(str(run)), "x.json", b"{}")


WAYS_TO_SAVE = {
    "trainer": ["checkpoint-500/model.safetensors", "checkpoint-500/trainer_state.json"],
    "several": ["checkpoint-500/model.safetensors", "checkpoint-1000/model.safetensors"],
    "components": ["checkpoint-5/unet/diffusion_pytorch_model.safetensors", "checkpoint-5/optimizer.bin"],
    "megatron": ["iter_0000500/mp_rank_00/model_optim_rng.pt"],
    "deepspeed": ["global_step500/mp_rank_00_model_states.pt", "latest"],
    "dcp": ["step-5/.metadata", "step-5/__0_0.distcp"],
    "file": ["ckpt.pt"],
    "numbered file": ["epoch=0-step=2.ckpt"],
    "bare numbers": ["500/model.safetensors", "1000/model.safetensors"],
    "fixed name": ["best/model.safetensors", "last/model.safetensors"],
    "uncounted word": ["model-5/model.safetensors", "model-6/model.safetensors"],
    "checkpoints folder": ["checkpoints/epoch=0-step=2.ckpt", "hparams.yaml"],
    "accelerate": ["checkpoints/checkpoint_0/model.safetensors"],
    "final": ["model.safetensors", "config.json"],
    "not yet": ["_ckptguard/format.json"],
}


@pytest.mark.parametrize("files", WAYS_TO_SAVE.values(), ids=WAYS_TO_SAVE.keys())
@pytest.mark.parametrize("above", ["", "team/"])
def test_a_folder_that_holds_checkpoints_is_a_run(tmp_path: Path, files: list[str], above: str) -> None:
    """Whatever the trainer's layout, the run is the folder around its saves, with one level of folders above or none.
    What lies beside the saves makes no difference."""
    for name in (f"{above}exp", f"{above}other"):
        put(tmp_path, *(f"{name}/{file}" for file in files), f"{name}/logs/events.1", f"{name}/src/train.py")
    put(tmp_path, "data/tokens.bin.idx", "notes.txt", f"{above}begun/")
    assert found(tmp_path) == [f"{above}exp", f"{above}other"]


@pytest.mark.parametrize("files", WAYS_TO_SAVE.values(), ids=WAYS_TO_SAVE.keys())
def test_a_run_may_be_named_itself(tmp_path: Path, files: list[str]) -> None:
    """A fleet may be one run."""
    put(tmp_path, *(f"exp/{file}" for file in files), "exp/logs/events.1")
    fleet = find_runs(str(tmp_path / "exp"), PLAIN)
    assert [(run.url, run.name) for run in fleet.runs] == [(str(tmp_path / "exp"), "exp")]


def test_a_run_in_a_run_is_found_once(tmp_path: Path) -> None:
    """What lies in a run is the run's: a backup in it, its samples, and what another folder of the fleet names."""
    put(tmp_path, "exp/checkpoint-5/model.safetensors", "exp/samples/last.pt", "exp/backup/checkpoint-5/a.safetensors")
    give_records(tmp_path / "exp")
    give_records(tmp_path / "exp" / "backup")
    file = tmp_path / "fleet.toml"
    file.write_text('folders = [".", "exp/backup", "exp"]')
    assert found(tmp_path) == ["exp"]
    assert [run.url for run in find_runs(str(file), PLAIN).runs] == [str(tmp_path / "exp")]


def test_runs_with_numbers_are_no_checkpoints(tmp_path: Path) -> None:
    """Folders of runs that are named as saves may be, by job or by seed, are runs by what lies in them."""
    for job in (1001, 1002, 1003):
        put(tmp_path, f"{job}/checkpoint-5/model.safetensors", f"{job}/model.safetensors")
    assert found(tmp_path) == ["1001", "1002", "1003"]


@pytest.mark.parametrize("stray", ["last.pt", "checkpoint-9/model.safetensors", "_ckptguard/format.json"])
def test_a_stray_save_does_not_make_one_run_of_a_fleet(tmp_path: Path, stray: str) -> None:
    """A save beside runs, or a command on the folder around them, hides none of them; neither before nor after a
    restart."""
    for name in ("a-1", "b-2"):
        put(tmp_path, f"team/{name}/checkpoint-5/model.safetensors")
        give_records(tmp_path / "team" / name)
    discovery = Discovery(read_fleet(str(tmp_path / "team"), PLAIN))
    assert [run.name for run in discovery.find().runs] == ["a-1", "b-2"]
    put(tmp_path, f"team/{stray}")
    after = [run.name for run in discovery.find().runs]
    assert {"a-1", "b-2"} <= set(after)
    assert found(tmp_path / "team") == after


def test_depth_counts_levels_below_the_folder(tmp_path: Path) -> None:
    """Runs lie at most two levels down, or as many as the file says."""
    put(tmp_path, "a/last.pt", "b/c/last.pt", "d/e/f/last.pt")
    assert found(tmp_path) == ["a", "b/c"]
    for depth, names in ((0, []), (1, ["a"]), (3, ["a", "b/c", "d/e/f"])):
        (tmp_path / "fleet.toml").write_text(f'folders = ["."]\ndepth = {depth}')
        assert found(tmp_path / "fleet.toml") == names


def test_nothing_is_followed_out_or_entered_that_is_not_the_trainers(tmp_path: Path) -> None:
    """Links, records, hidden folders, temporaries and downloads hold no runs of the fleet."""
    put(tmp_path, "away/exp/last.pt", "fleet/.trash/exp/last.pt", "fleet/a/_ckptguard/kept/b/last.pt")
    put(tmp_path, "fleet/tmp-exp/last.pt", "fleet/models--org--x/snapshots/abc/model.safetensors", "fleet/a/last.pt")
    (tmp_path / "fleet" / "link").symlink_to(tmp_path / "away")
    (tmp_path / "fleet" / "loop").symlink_to(tmp_path / "fleet")
    assert found(tmp_path / "fleet") == ["a"]


def test_hostile_names_are_told_in_one_line(tmp_path: Path) -> None:
    """Control characters and bytes that are no text neither stop a search nor reach a terminal."""
    put(tmp_path, "a\x1b[31m\n/last.pt", "b\u202e/last.pt")
    os.makedirs(os.fsencode(tmp_path) + b"/\xff\xfe/checkpoint-5")
    locked = tmp_path / "c\x07"
    locked.mkdir()
    file = tmp_path / "fleet.toml"
    file.write_text('folders = [".", "gone\\u001b2J"]')
    fleet = find_runs(str(file), PLAIN)
    assert [run.name for run in fleet.runs] == ["a\x1b[31m\n", "b\u202e"]
    assert len(fleet.troubles) == 1
    assert "gone\\u001b2J cannot be searched" in fleet.troubles[0]


def test_a_secret_in_a_place_is_not_told(tmp_path: Path) -> None:
    """Not on a terminal, and not in a log."""
    (tmp_path / "fleet.toml").write_text('folders = ["s3://key:SECRET@bucket/runs"]')
    [trouble] = find_runs(str(tmp_path / "fleet.toml"), Settings()).troubles
    assert trouble.startswith("the URL s3://***@bucket/runs holds a secret")


def test_a_folder_that_cannot_be_listed_is_told_and_its_runs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed listing says nothing about the runs below it: they stay, and the others are searched."""
    put(tmp_path, "a/x/last.pt", "b/y/last.pt")
    discovery = Discovery(read_fleet(str(tmp_path), PLAIN))
    assert [run.name for run in discovery.find().runs] == ["a/x", "b/y"]
    honest = LocalStorage.list

    def failing(self: LocalStorage, prefix: str = "", **options: object) -> object:
        if prefix == "a":
            raise NotFoundError("the disk is away")
        return honest(self, prefix, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStorage, "list", failing)
    put(tmp_path, "b/z/last.pt")
    fleet = discovery.find()
    assert [run.name for run in fleet.runs] == ["a/x", "b/y", "b/z"]
    assert fleet.troubles == (f"{tmp_path}/a cannot be searched: the disk is away",)
    monkeypatch.undo()
    assert discovery.find().troubles == ()


def test_more_folders_than_it_lists_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of a whole file system ends, and says what to do."""
    monkeypatch.setattr(searching, "MOST_FOLDERS", 5)
    put(tmp_path, *(f"{number}x/y/" for number in range(9)))
    fleet = find_runs(str(tmp_path), PLAIN)
    [trouble] = fleet.troubles
    assert "more than 5 folders" in trouble


def test_what_did_not_change_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second search lists no folder but those that changed, and none of a run's."""
    for number in range(20):
        put(tmp_path, f"team{number % 4}/exp{number}/checkpoint-5/model.safetensors")
    for folder in (tmp_path, *tmp_path.iterdir()):
        os.utime(folder, (1, 1))
    discovery = Discovery(read_fleet(str(tmp_path), PLAIN))
    assert len(discovery.find().runs) == 20
    listed: list[str] = []
    honest = LocalStorage._walk

    def counting(self: LocalStorage, prefix: str, **options: object) -> object:
        listed.append(prefix)
        return honest(self, prefix, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStorage, "_walk", counting)
    put(tmp_path, "team0/exp0/checkpoint-6/model.safetensors")
    assert len(discovery.find().runs) == 20
    assert listed == []
    put(tmp_path, "team1/new/checkpoint-5/model.safetensors")
    assert len(discovery.find().runs) == 21
    assert set(listed) == {"team1", "team1/new", "team1/new/checkpoint-5"}


def test_runs_of_an_object_store(tmp_path: Path) -> None:
    """The same for URLs, with patterns for the folders, and without a listing of what is known as a run."""
    for name in ("team-a/exp1", "team-b/exp2", "other/exp3"):
        save(f"memory://bucket/{name}", 5, 1)
    assert found("memory://bucket") == ["other/exp3", "team-a/exp1", "team-b/exp2"]
    assert found("memory://bucket/team-*") == ["team-a/exp1", "team-b/exp2"]
    assert [run.url for run in find_runs("memory://bucket/team-*", PLAIN).runs] == [
        "memory://bucket/team-a/exp1",
        "memory://bucket/team-b/exp2",
    ]
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_replicas_of_the_fleets_runs_are_no_runs(tmp_path: Path) -> None:
    """A replica below the fleet's folder is not guarded as a run of its own."""
    put(tmp_path, "exp/last.pt", "copies/exp/last.pt")
    fleet = find_runs(str(tmp_path), Settings(replicas=(f"{tmp_path}/copies/{{run}}",)))
    assert [run.name for run in fleet.runs] == ["exp"]


PIECES = st.sampled_from(["a", "b", "team", "7"])
STEPS = st.sampled_from(["save", "remove", "records", "stray"])


@given(data=st.data())
def test_searching_again_finds_what_a_first_search_finds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After any changes a search that remembers finds what a new one does, once each run has records."""
    root = tmp_path_factory.mktemp("fleet")
    discovery = Discovery(read_fleet(str(root), PLAIN))
    for _ in range(data.draw(st.integers(1, 6))):
        place = root / "/".join(data.draw(st.lists(PIECES, min_size=1, max_size=2)))
        match data.draw(STEPS):
            case "save":
                put(place, f"checkpoint-{data.draw(st.integers(1, 9))}/model.safetensors")
            case "stray":
                put(place.parent, "last.pt")
            case "records":
                put(place, "_ckptguard/format.json")
            case "remove":
                fsspec.filesystem("file").rm(str(place), recursive=True) if place.exists() else None
        fleet = discovery.find()
        for run in fleet.runs:
            put(Path(run.url), "_ckptguard/format.json")
        assert discovery.find() == find_runs(str(root), PLAIN)


@pytest.mark.parametrize("files", WAYS_TO_SAVE.values(), ids=WAYS_TO_SAVE.keys())
def test_a_save_that_is_written_while_it_is_searched_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str]
) -> None:
    """At whichever listing each file of the first save appears: its run is found then, or at the next search."""
    listed = LocalStorage.list
    for early in range(len(files) + 1):
        for late in range(1, 7):
            root = tmp_path / f"fleet-{early}-{late}"
            put(root, *(f"a/{name}" for name in files[:early]), *(f"a/{Path(name).parent}/" for name in files))
            calls = 0

            def list_with_writer(
                self: LocalStorage,
                *words: object,
                root: Path = root,
                early: int = early,
                late: int = late,
                **how: object,
            ) -> object:
                nonlocal calls
                calls += 1
                if calls == late:
                    put(root, *(f"a/{name}" for name in files[early:]))
                return listed(self, *words, **how)  # type: ignore[arg-type]

            monkeypatch.setattr(LocalStorage, "list", list_with_writer)
            searched = searching.RunSearch(str(root), (), 3, PLAIN)
            assert searched.find() in ([], ["a"]), (early, late)
            put(root, *(f"a/{name}" for name in files))
            assert searched.find() == ["a"]
