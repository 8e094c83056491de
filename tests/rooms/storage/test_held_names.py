"""No trainer that looks for its checkpoints below a run finds one in our records; all that lay there comes back."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.records_on_disk import at
from support.runs import QUICK, write_sharded, write_torch
from support.views import look

from ckptguard.keep.quarantine import quarantine
from ckptguard.records.kept import read_kept
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.storage import open_storage
from ckptguard.storage.local import held_names
from ckptguard.upkeep.leftovers import collect_leftovers
from ckptguard.upkeep.migrate import migrate
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy

# What the resumes and rotations of trainers look for, each by the name of a file or folder anywhere below the run.
PATTERNS = (
    *("*.pt", "*.pth", "*.ckpt", "*.bin", "*.safetensors", "*.tar", "*.pkl", "*.npz", "*.distcp", ".metadata"),
    *("step-*", "step_*", "checkpoint*", "CKPT*", "global_step*", "iter_*", "epoch*", "last*", "best*", "recovery-*"),
    *("model*", "ckpt*", "latest", "*.index.json", "trainer_state.json", "*.yaml", "net-*", "lit_model*", "mp_rank_*"),
)
NAMES = (
    *("ckpt.pt", "last.pt", "best.pt", "epoch3.pt", "last.pth.tar", "checkpoint-7.pth.tar", "model_best.pth.tar"),
    *("recovery-0-950.pth.tar", "epoch_latest.pt", "checkpoint_last.pt", "checkpoint_1_500.pt", "checkpoint0020.pth"),
    *("epoch=1-step=20.ckpt", "last.ckpt", "step-00000020/lit_model.pth", "CKPT+2026-01-01+00/brain.ckpt"),
    *("global_step500/mp_rank_00_model_states.pt", "iter_0000500/model_optim_rng.pt", "checkpoint-500/optimizer.pt"),
    *("checkpoint-500/trainer_state.json", "step_9/.metadata", "step_9/__0_0.distcp", "weights/last.pt"),
)


def _wrapped(name: str) -> st.SearchStrategy[str]:
    """The name, held up to three times."""
    return st.sampled_from([f"{'held.' * n}{name}{'.held' * n}" for n in range(4)])


def found_in_records(root: Path) -> list[str]:
    """What any trainer's own look below the run finds in our records."""
    records = root / "_ckptguard"
    walked = [name for _, folders, files in os.walk(records) for name in (*folders, *files)]
    found = [name for name in walked for pattern in PATTERNS if fnmatch.fnmatchcase(name, pattern)]
    for pattern in PATTERNS:
        found += [str(p) for p in root.rglob(pattern) if records in p.parents]
        found += [p for p in glob.glob(f"{glob.escape(str(root))}/**/{pattern}", recursive=True) if "/_ckptguard/" in p]
    return found


def content(root: Path) -> dict[str, bytes]:
    """Every file of a run but our records."""
    files = (path for path in root.rglob("*") if path.is_file() and "_ckptguard" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@given(names=st.sets(st.sampled_from(NAMES), min_size=1), top=st.sampled_from(["kept", "quarantine", "trash"]))
@settings(max_examples=30)
def test_whatever_is_moved_or_copied_there_has_no_name_of_a_trainer(tmp_path_factory, names, top):
    """Moved as whole folders or copied as files, by their names; and back under those names, byte for byte."""
    root = tmp_path_factory.mktemp("run")
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    before, storage = content(root), open_storage(root)
    for first in sorted({name.partition("/")[0] for name in names}):
        storage.move(first, f"_ckptguard/{top}/{first.replace('9', '#')}/000000000001.1/{first}")
    assert content(root) == {}
    assert found_in_records(root) == []
    entries = storage.list(f"_ckptguard/{top}", recursive=True)
    assert {entry.key.split("/", 4)[4] for entry in entries} == set(names)
    for entry in entries:
        assert storage.stat(entry.key) == entry
        storage.copy(entry.key, f"_ckptguard/kept/-/000000000002.1/{entry.key.split('/', 4)[4]}")
        storage.move(entry.key, entry.key.split("/", 4)[4])
    assert content(root) == before
    assert found_in_records(root) == []


@pytest.mark.parametrize("write", [write_sharded, write_torch])
def test_a_run_that_was_kept_pruned_and_rolled_back_shows_nothing(tmp_path, write):
    """Kept copies, quarantine and trash: all of it is out of the sight of globs, and is restored as it was saved."""
    root = tmp_path / "run"
    for step in (100, 200, 300, 400):
        write(root, step, seed=step)
    saved, run = content(root), open_run(str(root))
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes())
    prune(look(run), Policy(keep_last=2), grace=86400.0)
    roll_back(look(run), GoBack(reason="a spike", before_step=400))
    assert {p.name for p in (root / "_ckptguard").iterdir()} >= {"kept", "quarantine", "trash"}
    assert found_in_records(root) == []
    for step in (100, 200, 300, 400):
        done = restore(look(run), str(tmp_path / str(step)), step=step, force=True)
        name = Path(done.path).name
        assert content(tmp_path / str(step)) == {k: v for k, v in saved.items() if k.split("/")[0] == name}


def test_known_good_leads_to_a_kept_copy_by_its_own_names(tmp_path):
    """Rotated away, it is answered with a path that a loader can open, outside the run; again the same one."""
    root = tmp_path / "run"
    write_sharded(root, 100, seed=1)
    saved, run = content(root), open_run(str(root))
    reconcile(look(run), PassNotes())
    shutil.rmtree(root / "sharded-100")
    path = Path(find_known_good(run).path)
    assert not path.is_relative_to(root)
    assert content(path) == {name.removeprefix("sharded-100/"): data for name, data in saved.items()}
    assert Path(find_known_good(run).path) == path


def test_what_was_changed_among_the_links_is_made_anew(tmp_path):
    """A file written over a link, a link removed, led elsewhere, or added: the next answer is what was kept again."""
    root = tmp_path / "run"
    write_sharded(root, 100, seed=1)
    saved, run = content(root), open_run(str(root))
    reconcile(look(run), PassNotes())
    shutil.rmtree(root / "sharded-100")
    path = Path(find_known_good(run).path)
    first, second, third, *_ = sorted(path.iterdir())
    for link in (first, second, third):
        link.unlink()
    first.write_bytes(b"another")
    second.symlink_to("/dev/null")
    (path / "more").write_bytes(b"")
    assert Path(find_known_good(run).path) == path
    assert content(path) == {name.removeprefix("sharded-100/"): data for name, data in saved.items()}


def test_links_are_not_made_where_others_may_change_them(tmp_path, monkeypatch):
    """A folder of the cache that others may write in is not used."""
    root, cache = tmp_path / "run", tmp_path / "cache"
    (cache / "ckptguard/known-good").mkdir(parents=True)
    (cache / "ckptguard/known-good").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    write_sharded(root, 100, seed=1)
    saved, run = content(root), open_run(str(root))
    reconcile(look(run), PassNotes())
    shutil.rmtree(root / "sharded-100")
    path = Path(find_known_good(run).path)
    assert not path.is_relative_to(cache)
    assert content(path) == {name.removeprefix("sharded-100/"): data for name, data in saved.items()}


@given(names=st.sets(st.sampled_from(["a.pt", "x.held", "held.x"]).flatmap(_wrapped), min_size=1, max_size=6))
@settings(max_examples=30)
def test_names_like_those_of_the_records_are_told_apart(tmp_path_factory, names):
    """A trainer's own name may look like one that is held."""
    storage = open_storage(root := tmp_path_factory.mktemp("run"))
    folder = "_ckptguard/kept/a-#/000000000001.1"
    for name in sorted(names):
        (root / name).write_bytes(name.encode())
        storage.copy(name, f"{folder}/{name}")
    assert {entry.key for entry in storage.list(folder, recursive=True)} == {f"{folder}/{name}" for name in names}
    for name in names:
        with storage.open(f"{folder}/{name}") as reader:
            assert reader.read(0, len(name)) == name.encode()


def as_an_older_version_left_it(root: Path) -> None:
    """Every name in the records plain, and `format.json` of format 1."""
    for folder, folders, files in os.walk(root / "_ckptguard", topdown=False):
        for name in (*folders, *files):
            os.rename(Path(folder, name), Path(folder, held_names.own_name(name)))
    (root / "_ckptguard/format.json").write_text('{"format": 1}\n')


def test_a_run_of_an_older_version_is_read_restored_and_goes_on(tmp_path):
    """Plain names are found. New ones are plain too, until a person raises the format: then they have the new form, and
    what was moved gets it."""
    root = tmp_path / "run"
    for step in (100, 200, 300):
        write_sharded(root, step, seed=step)
    saved, run = content(root), open_run(str(root))
    reconcile(look(run), PassNotes())
    roll_back(look(run), GoBack(reason="a spike", before_step=300))
    shutil.rmtree(root / "sharded-200")
    as_an_older_version_left_it(root)
    assert found_in_records(root)
    assert str(find_known_good(run).id) == "200.1"
    for step in (200, 300):
        done = restore(look(run), str(tmp_path / str(step)), step=step, force=True)
        assert Path(done.path).name == f"sharded-{step}"
        assert content(tmp_path / str(step)) == {k: v for k, v in saved.items() if k.startswith(f"sharded-{step}/")}
    write_sharded(root, 400, seed=4)
    reconcile(look(run), PassNotes())
    assert str(find_known_good(run).id) == "400.1"
    assert read_kept(run, CheckpointId("sharded-#", 400, 1)) is not None
    assert "sharded-400" in os.listdir(at(root, "_ckptguard/kept/sharded-#/000000000400.1"))  # as an older one reads it
    assert json.loads((root / "_ckptguard/format.json").read_text()) == {"format": 1}
    migrate(run, dry_run=False)
    write_sharded(root, 500, seed=5)
    reconcile(look(run), PassNotes())
    assert "held.sharded-500.held" in os.listdir(at(root, "_ckptguard/kept/sharded-#/000000000500.1"))
    assert str(find_known_good(run).id) == "500.1"
    collect_leftovers(look(run))
    assert os.listdir(at(root, "_ckptguard/quarantine/sharded-#/000000000300.1")) == ["held.sharded-300.held"]
    assert not list((root / "_ckptguard/quarantine").rglob("*.safetensors"))


def test_a_move_that_was_killed_halfway_is_whole_and_is_finished(tmp_path, monkeypatch):
    """Killed between the rename of a folder and those of its files, all of it is still found by its key."""
    root = tmp_path / "run"
    write_sharded(root, 100, seed=1)
    saved, run = content(root), open_run(str(root))
    reconcile(look(run, QUICK.changed(keep="none")), PassNotes())
    with monkeypatch.context() as patched:
        patched.setattr(type(run.storage), "settle_names", lambda storage, key: None)
        quarantine(look(run), "sharded-100", reason="a test")
    assert list((root / "_ckptguard").rglob("*.safetensors"))
    done = restore(look(run), str(tmp_path / "out"), step=100, force=True)
    assert content(Path(done.path).parent) == saved
    collect_leftovers(look(run))
    assert found_in_records(root) == []
