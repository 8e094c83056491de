"""How a trainer saves again under one name decides whether a link is as safe as a copy."""

import itertools

import msgspec
import pytest
from support.runs import QUICK, save_file, state_dict
from support.views import look

from ckptguard.keep import saved_over
from ckptguard.keep.saved_over import freed_before_writing, keeps_old_bytes
from ckptguard.records.run import open_run
from ckptguard.storage.local import birth_time, folders
from ckptguard.upkeep.reconcile import PassNotes, reconcile

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
