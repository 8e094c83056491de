"""Kept copies are promoted and released by what their marks say, and not by one reading that was wrong."""

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kept_runs import guarded
from support.records_on_disk import at
from support.runs import QUICK, state_dict
from support.views import look

from ckptguard.errors import StorageError
from ckptguard.records import kept, move_marks
from ckptguard.records.run import open_run
from ckptguard.retention.pin import pin
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.work import PLAIN, Work
from ckptguard.upkeep import finish_copies as settle
from ckptguard.upkeep.finish_copies import finish_copies
from ckptguard.upkeep.reconcile import PassNotes, reconcile


@pytest.mark.parametrize("number", range(4))
def test_a_mark_that_reads_wrong_once_releases_nothing(root, monkeypatch, number):
    """Whichever byte of a mark reads wrong, at whichever reading, its copy stays."""
    run = guarded(root)
    for step in (100, 200):
        shutil.rmtree(root / f"sharded-{step}")  # rotated away: the copies are all that is left
    copies = kept.list_kept(run)
    real = move_marks.read_record
    length = len(real(run, kept.kept_folder(copies[0]) + ".json"))
    for place in range(0, length, 7):
        readings = itertools.count()

        def wrong(run, key, place=place, readings=readings):
            text = real(run, key)
            if text is None or next(readings) != number:
                return text
            return text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :] if place < len(text) else text

        with monkeypatch.context() as faulty:
            faulty.setattr(move_marks, "read_record", wrong)
            finish_copies(look(run))
        assert kept.list_kept(run) == copies, f"byte {place}"


@settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    acts=st.lists(st.sampled_from(["touch", "touch back", "pass", "rotate", "copy beside"]), max_size=6),
    name=st.sampled_from(["ckpt.pt", "epoch_3.pt"]),
    ended=st.sampled_from(["intact", "written through", "cut"]),
)
def test_a_link_is_released_for_its_bytes_and_not_for_its_times(acts, name, ended):
    """Touched, by whatever name of the file: it stays, and is known-good after the next pass. Other bytes: it goes."""
    with tempfile.TemporaryDirectory() as folder:
        path, run, links = Path(folder, name), open_run(folder), QUICK.changed(keep="link")
        torch.save(state_dict(1, layers=1, width=8), path)
        content = path.read_bytes()
        reconcile(look(run, links), PassNotes())
        [id] = kept.list_kept(run)
        copy = at(folder, f"_ckptguard/{kept.read_kept(run, id).checkpoint_key}")
        for number, act in enumerate([*acts, "rotate", "touch"]):
            if act == "pass":
                reconcile(look(run, links), PassNotes())
            elif act == "rotate":
                path.unlink(missing_ok=True)
            elif act == "copy beside" and path.exists():
                os.replace(shutil.copy(path, path.with_name("tmp")), path)
            elif act.startswith("touch"):
                os.utime(copy, ns=(number + 1, number + 1))
        if ended == "written through":
            copy.write_bytes(content[:-1] + b"x")
            os.utime(copy, ns=(10**15, 10**15))
        elif ended == "cut":
            copy.write_bytes(content[:-9])
        reconcile(look(run, links), PassNotes())
        if ended == "intact":
            assert kept.list_kept(run) == [id]
            assert Path(find_known_good(run).path).read_bytes() == content
        else:
            assert id not in kept.list_kept(run)


def test_a_touched_link_is_read_once(root):
    """Its times are noted: the next pass reads nothing."""
    torch.save(state_dict(1, layers=1, width=8), root / "ckpt.pt")
    run, links, read = open_run(str(root)), QUICK.changed(keep="link"), []
    reconcile(look(run, links), PassNotes())
    os.utime(root / "ckpt.pt", ns=(1, 1))
    (root / "ckpt.pt").unlink()

    def scanner(storage, keys, options, progress):
        read.extend(keys)
        return PLAIN.scanner(storage, keys, options, progress)

    for _ in range(2):
        assert finish_copies(look(run, links), work=Work(scanner=scanner)) == []
    assert len(read) == 1


@pytest.mark.parametrize("failing", [100, 200, 300])
def test_trouble_with_one_checkpoint_holds_up_no_other(root, monkeypatch, failing):
    """The others are kept, and a sentence names the trouble."""
    for step in (100, 200, 300):
        (root / f"checkpoint-{step}").mkdir()
        torch.save(state_dict(step, layers=1, width=8), root / f"checkpoint-{step}" / "model.pt")
    run, three = open_run(str(root)), QUICK.changed(keep_good=3)
    reconcile(look(run, three), PassNotes())
    copies = kept.list_kept(run)
    assert len(copies) == 3
    for id in copies:
        settle.release(run, id)
    real = settle.keep_checkpoint

    def fail(view, checkpoint, id, **words):
        if checkpoint.step == failing:
            raise StorageError("the disk failed", key=checkpoint.path)
        return real(view, checkpoint, id, **words)

    monkeypatch.setattr(settle, "keep_checkpoint", fail)
    troubles = finish_copies(look(run, three))
    assert [id.step for id in kept.list_kept(run)] == [step for step in (100, 200, 300) if step != failing]
    assert len(troubles) == 1
    assert "the disk failed" in troubles[0]


def test_nothing_is_trimmed_while_a_copy_is_in_doubt(root, monkeypatch):
    """It would count as the good one that stays, and the good one behind it would be removed."""
    run = guarded(root)
    copies = kept.list_kept(run)
    newest = max(copies, key=lambda id: id.order)

    def fail(run, copy, manifest):
        if copy.id == newest:
            raise StorageError("the disk failed", key=copy.folder)
        return True

    monkeypatch.setattr(settle, "kept_matches", fail)
    [trouble] = finish_copies(look(run, QUICK.changed(keep_good=1)))
    assert "the disk failed" in trouble
    assert kept.list_kept(run) == copies
    monkeypatch.undo()
    assert finish_copies(look(run, QUICK.changed(keep_good=1))) == []
    assert len(kept.list_kept(run)) < len(copies)


@pytest.mark.parametrize("keep", ["auto", "copy", "link"])
@pytest.mark.parametrize("change", ["touched", "renamed over", "copied over"])
def test_a_copy_of_a_place_that_was_touched_counts_and_stays(root, keep, change):
    """Its files are not those that were sealed, and the bytes are: it is read once, made once, and known-good."""
    path, run, settings = root / "ckpt.pt", open_run(str(root)), QUICK.changed(keep=keep)
    torch.save(state_dict(1, layers=1, width=8), path)
    content, notes = path.read_bytes(), PassNotes()
    reconcile(look(run, QUICK.changed(keep="none")), PassNotes())
    if change == "renamed over":
        path.with_name("tmp").write_bytes(content)
        os.replace(path.with_name("tmp"), path)
    elif change == "copied over":
        path.write_bytes(content)
    os.utime(path, ns=(10**18, 10**18))
    for _ in range(2):
        assert reconcile(look(run, settings), notes).could_not_tell == ()
    [id] = kept.list_kept(run)
    made = kept.read_kept(run, id)
    for _ in range(2):
        assert finish_copies(look(run, settings), work=Work(scanner=forbidden)) == []
    assert kept.read_kept(run, id) == made
    path.unlink()
    reconcile(look(run, settings), PassNotes())
    found = find_known_good(run)
    assert found.kept
    assert Path(found.path).read_bytes() == content


def forbidden(*_words):
    """A scanner for those who have nothing to read."""
    raise AssertionError("a file was read again")


def test_a_copy_of_something_else_goes_although_it_is_pinned(root):
    """What is pinned is what was sealed, and not what raced with it."""
    path, run = root / "ckpt.pt", open_run(str(root))
    torch.save(state_dict(1, layers=1, width=8), path)
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes())
    [id] = kept.list_kept(run)
    copy = kept.read_kept(run, id)
    view = look(run)
    pin(view, view.checkpoint("ckpt.pt"), note="best")
    at(str(root), f"_ckptguard/{copy.checkpoint_key}").write_bytes(b"x" * path.stat().st_size)
    sources = tuple((size, 7, 7, etag) for size, _, _, etag in copy.sources)
    kept.replace_kept(run, msgspec.structs.replace(copy, sources=sources, read_at=()))
    assert finish_copies(look(run)) == []
    [id] = kept.list_kept(run)  # made anew, of what lies in place
    assert at(str(root), f"_ckptguard/{kept.read_kept(run, id).checkpoint_key}").read_bytes() == path.read_bytes()
