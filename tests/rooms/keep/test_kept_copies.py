"""Kept copies: how they are made, whether they still are ones, and what they cost."""

import itertools
import os
import uuid

import fsspec
import msgspec
import pytest
import torch
from support.records_on_disk import at
from support.runs import QUICK, save_file, state_dict, write_torch
from support.views import look

from ckptguard.inspect.list_states import survey
from ckptguard.keep import saved_over
from ckptguard.keep.copies import keep_checkpoint
from ckptguard.keep.room import own_bytes
from ckptguard.keep.saved_over import freed_before_writing, keeps_old_bytes
from ckptguard.records.kept import read_kept
from ckptguard.records.run import open_run
from ckptguard.retention.pin import pin
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.runs.lock import run_lock
from ckptguard.runs.sealed_content import kept_matches
from ckptguard.storage.local import birth_time, folders
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId, series_of
from ckptguard.values.verdict import Outcome


def test_a_link_that_was_written_through_is_no_copy(root, run):
    """A trainer that saves into the same file changes a hard link too: it no longer counts, and is not kept."""
    torch.save(state_dict(1), root / "net-1.pt")
    reconcile(look(run, QUICK.changed(keep="link")), PassNotes())
    copy = read_kept(run, CheckpointId(series_of("net-1.pt"), 1, 1))
    if copy.how != "link":
        pytest.skip("this file system makes no hard link here")
    manifest = load_history(run).manifest(CheckpointId(copy.series, 1, 1))
    assert kept_matches(run, copy, manifest)
    content = state_dict(2)
    before = (root / "net-1.pt").stat().st_ino
    torch.save(content, root / "net-1.pt")
    assert (root / "net-1.pt").stat().st_ino == before
    assert not kept_matches(run, copy, manifest)


def test_a_copy_that_outlives_its_damaged_place_is_listed_as_what_it_is(root, run):
    """Bad while the damage is there; afterwards the listing speaks of the copy, as known-good does."""
    torch.save(state_dict(1), path := root / "net-1.pt")
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes())
    data, times = bytearray(path.read_bytes()), path.stat()
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes())
    assert [(s.outcome, s.in_place) for s in survey(look(run))] == [(Outcome.BAD, True)]
    path.unlink()
    found = [(s.outcome, s.in_place, s.kept, s.reason) for s in survey(look(run))]
    assert found == [(Outcome.GOOD, False, True, "")]
    assert find_known_good(run).kept


@pytest.mark.parametrize(
    ("keep", "name", "expected"),
    [
        ("auto", "net-1.pt", {"link", "reflink"}),
        ("auto", "last.pt", {"link", "reflink"}),  # until it is good, or seen to be saved over
        ("link", "last.pt", {"link", "reflink"}),
        ("copy", "net-1.pt", {"copy"}),
        ("none", "net-1.pt", {None}),
    ],
)
def test_the_setting_says_how(root, run, keep, name, expected):
    """A link where that is safe or asked for, bytes of its own, or none at all."""
    torch.save(state_dict(1), root / name)
    [checkpoint] = look(run).checkpoints
    with run_lock(run):
        copy = keep_checkpoint(
            look(run, QUICK.changed(keep=keep)), checkpoint, CheckpointId(checkpoint.series, checkpoint.step, 1)
        )
    assert (copy and copy.how) in expected
    if copy is not None:
        kept, original = at(root, f"_ckptguard/{copy.key(name)}"), root / name
        assert kept.read_bytes() == original.read_bytes()
        assert kept.samefile(original) == (copy.how == "link")
        if copy.how != "reflink":
            assert own_bytes(run, copy) == (0 if copy.how == "link" else kept.stat().st_blocks * 512)


def test_a_link_on_a_server_that_does_not_count_names(root, run, monkeypatch):
    """It costs nothing while the checkpoint's own file is the same, and its size when that is another, or gone."""
    torch.save(state_dict(1), root / "net-1.pt")
    [checkpoint] = look(run).checkpoints
    with run_lock(run):
        copy = keep_checkpoint(
            look(run, QUICK.changed(keep="link")), checkpoint, CheckpointId(checkpoint.series, checkpoint.step, 1)
        )
    copy = msgspec.structs.replace(copy, how="link")
    os.utime(at(root, "_ckptguard/" + copy.key("net-1.pt")), ns=(0, (root / "net-1.pt").stat().st_mtime_ns))
    monkeypatch.setattr(run.records, "root", None)
    assert own_bytes(run, copy) == 0
    size = (root / "net-1.pt").stat().st_size
    (root / "net-1.pt").unlink()
    assert own_bytes(run, copy) == size
    torch.save(state_dict(2), root / "net-1.pt")
    os.utime(root / "net-1.pt", (1, 1))
    assert own_bytes(run, copy) == size


def test_on_an_object_store_the_copy_is_the_stores_own(tmp_path, monkeypatch):
    """No byte comes here and goes back; the copy is known-good when the original is gone, and costs its size."""
    url = f"memory://kept-{uuid.uuid4().hex}"
    memory = fsspec.filesystem("memory")
    write_torch(tmp_path, 100, seed=1)
    content = (tmp_path / "net-100.pt").read_bytes()
    memory.pipe_file(f"{url.removeprefix('memory:/')}/net-100.pt", content)
    copied = []
    real = type(memory).cp_file
    monkeypatch.setattr(type(memory), "cp_file", lambda *a, **k: (copied.append(a[1]), real(*a, **k))[1])
    run = open_run(url)
    reconcile(look(run), PassNotes(), assume_quiet=True)
    assert [path.rpartition("/")[2] for path in copied] == ["net-100.pt"]
    [state] = survey(look(run))
    assert (state.kept, state.kept_how, state.kept_bytes) == (True, "copy", len(content))
    run.storage.remove("net-100.pt")
    assert find_known_good(run).kept


def test_no_pin_holds_the_rest_of_an_unfinished_copy(root, run):
    """What was killed before its mark counts as nothing: a pin keeps checkpoints."""
    write_torch(root, 1, 1)
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes())
    [checkpoint] = look(run).checkpoints
    pin(look(run), checkpoint)
    (mark,) = (root / "_ckptguard" / "kept").glob("*/*.json")
    os.unlink(root / "net-1.pt")
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes())
    files = [p for p in (root / "_ckptguard" / "kept").rglob("*") if p.is_file() and p.suffix != ".json"]
    assert len(files) == 1
    mark.unlink()
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes())
    assert not files[0].exists()


NUMBERED, FIXED = "net-7.safetensors", "last.safetensors"


def save(path, seed, way):
    """Save by renaming a new file, or into the file that is there."""
    temporary = path.with_name(".new")
    save_file(state_dict(seed, layers=1), temporary)
    if way == "rename":
        temporary.replace(path)
    else:
        path.write_bytes(temporary.read_bytes())
        temporary.unlink()


@pytest.mark.parametrize("name", [NUMBERED, FIXED])
@pytest.mark.parametrize("ways", list(itertools.product(("rename", "in place"), repeat=3)))
def test_a_link_is_safe_after_two_saves_by_rename(tmp_path, name, ways):
    """After each save: a link may replace a copy if the last two saves under the name came by rename, or if the name
    has a step and was saved once."""
    root = tmp_path / "run"
    root.mkdir()
    notes = PassNotes()
    save(root / name, 0, "rename")
    for number in range(len(ways) + 1):
        if number:
            save(root / name, number, ways[number - 1])
        reconcile(look(open_run(str(root)), QUICK), notes)
        view = look(open_run(str(root)), QUICK)
        [checkpoint] = view.checkpoints
        safe = keeps_old_bytes(view, checkpoint.series, checkpoint.step, checkpoint.path)
        by_rename = number >= 2 and set(ways[number - 2 : number]) == {"rename"}
        assert safe == (by_rename or (number == 0 and name == NUMBERED)), (number, ways)


@pytest.fixture
def one_inode(monkeypatch):
    """A file system that gives the inode of the deleted file to the next one under its name, as ext4 often does."""
    found = folders.entry_of

    def reused(key, info, target=None):
        entry = found(key, info, target)
        return msgspec.structs.replace(entry, inode=7) if key == FIXED else entry

    monkeypatch.setattr(folders, "entry_of", reused)


@pytest.mark.parametrize("way", ["rename", "in place"])
@pytest.mark.parametrize("birth", ["known", "unknown"])
def test_only_what_surely_is_the_same_file_frees_its_space_before_a_save(tmp_path, monkeypatch, one_inode, way, birth):
    """A save that truncates its file first needs no new room. One that replaces the file does, although both files may
    have the same inode; and so does any of which the system does not say when its file was made."""
    root = tmp_path / "run"
    root.mkdir()
    if birth == "unknown":
        monkeypatch.setattr(saved_over, "born_ns", lambda path: None)
    elif birth_time.born_ns(str(root)) is None:
        pytest.skip("this file system does not say when a file was made")
    notes = PassNotes()
    for number in range(4):
        save(root / FIXED, number, way)
        view = look(open_run(str(root)), QUICK)
        [checkpoint] = view.checkpoints
        assert [entry.inode for entry in checkpoint.entries] == [7]
        if number != 1:  # the first two may have the same time on a coarse clock
            same = way == "in place" and birth == "known" and number > 1
            assert freed_before_writing(view, checkpoint) == (checkpoint.bytes if same else 0), number
        reconcile(view, notes)
