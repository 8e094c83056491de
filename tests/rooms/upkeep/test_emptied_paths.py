"""Where a pass saw a path empty, or a rollback emptied it, whatever appears there is a new save, whatever its times."""

import itertools
import os
import shutil
import time

import pytest
import torch
from support.faults import flip
from support.runs import QUICK, save_file, state_dict
from support.views import look

from ckptguard.records.emptied import FOLDER
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint

LINKS = QUICK.changed(keep="none")  # damage in place is then not put back


def save(root, kind, step, seed, *, one_number=False):
    """A save of one file, or of a folder; `one_number` of it differs from what the seed gives."""
    state = state_dict(seed)
    if one_number:
        state["embed.weight"][0, 0] += 1
    if kind == "file":
        torch.save(state, root / f"net-{step}.pt")
        return root / f"net-{step}.pt"
    folder = root / f"model-{step}"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    return folder


def files_of(place):
    """The files of a save, in order."""
    return sorted(place.iterdir()) if place.is_dir() else [place]


def remove(place):
    """Remove a save."""
    shutil.rmtree(place) if place.is_dir() else place.unlink()


def put_back(source, place):
    """What `cp -a` does."""
    shutil.copytree(source, place) if source.is_dir() else shutil.copy2(source, place)


CASES = [*itertools.product(("file", "folder"), ("rollback", "once", "daemon"), (-1000, 0, 1), (False, True))]


@pytest.mark.parametrize(("kind", "emptied", "seconds", "one_number"), CASES)
def test_what_appears_at_an_emptied_path_is_a_new_save(root, tmp_path, kind, emptied, seconds, one_number):
    """A healthy replay with older, equal or newer times, of which all or one number differs, is good."""
    notes = PassNotes()
    places = [save(root, kind, step, step) for step in (100, 200, 300)]
    reconcile(look(str(root), LINKS), notes)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    replay = save(elsewhere, kind, 300, 300 if one_number else 999, one_number=one_number)
    for new, old in zip(files_of(replay), files_of(places[2]), strict=True):
        time = old.stat().st_mtime_ns + seconds * 10**9
        os.utime(new, ns=(time, time))
    if emptied == "rollback":
        roll_back(look(str(root), LINKS), GoBack(reason="NaN", before_step=250, check_writing=False))
    else:
        remove(places[2])
        reconcile(look(str(root), LINKS), notes if emptied == "daemon" else PassNotes())
    put_back(replay, places[2])
    checked = reconcile(look(str(root), LINKS), notes if emptied == "daemon" else PassNotes()).checked
    assert [(str(c.id), c.outcome) for c in checked if c.step == 300] == [("300.2", Outcome.GOOD)]
    flip(files_of(places[2])[0])
    view = look(str(root), LINKS)
    damaged = verify_checkpoint(view, next(c for c in view.checkpoints if c.step == 300))
    assert (str(damaged.id), damaged.outcome) == ("300.2", Outcome.BAD)


@pytest.mark.parametrize("seen", [False, True], ids=["by no pass", "by a pass"])
@pytest.mark.parametrize("back", ["moved", "copied"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_came_back_as_it_was_is_still_guarded(root, tmp_path, kind, back, seen):
    """The same bytes are the same generation, and damage of them afterwards is damage."""
    place = save(root, kind, 100, 100)
    reconcile(look(str(root), LINKS), PassNotes())
    aside = tmp_path / "aside"
    shutil.move(place, aside)
    reconcile(look(str(root), LINKS), PassNotes())
    assert [*(root / "_ckptguard" / FOLDER).rglob("*.json")]
    if back == "moved":
        shutil.move(aside, place)
    else:
        put_back(aside, place)
    if seen or back == "moved":
        reconcile(look(str(root), LINKS), PassNotes())
    else:
        view = look(str(root), LINKS)
        assert verify_checkpoint(view, view.checkpoints[0]).outcome is Outcome.GOOD
    flip(files_of(place)[0])
    view = look(str(root), LINKS)
    damaged = verify_checkpoint(view, view.checkpoints[0])
    assert (str(damaged.id), damaged.outcome) == ("100.1", Outcome.BAD)


def test_a_copy_of_another_step_is_no_new_save(root):
    """A path that was emptied and now holds exactly the numbers of another step is damaged."""
    places = [save(root, "folder", step, step) for step in (100, 200)]
    reconcile(look(str(root), LINKS), PassNotes())
    remove(places[1])
    reconcile(look(str(root), LINKS), PassNotes())
    put_back(places[0], places[1])
    checked = reconcile(look(str(root), LINKS), PassNotes()).checked
    assert [(str(c.id), c.outcome) for c in checked] == [("200.1", Outcome.BAD)]


def test_a_long_history_costs_few_marks(root):
    """Of many rotated steps only the newest are marked, each once."""
    for step in range(1, 71):
        save(root, "file", step, step)
    reconcile(look(str(root), LINKS), PassNotes())
    for place in root.glob("*.pt"):
        place.unlink()
    for _ in range(2):
        reconcile(look(str(root), LINKS), PassNotes())
        assert len([*(root / "_ckptguard" / FOLDER).rglob("*.json")]) == 64


def test_nothing_is_created_while_files_go(root):
    """A daemon marks a path some time after it saw the files go, because the run may be on its way out. It does not
    forget to."""
    place = save(root, "file", 100, 100)
    save(root, "file", 200, 200)
    settings, notes = LINKS.changed(settle=0.5), PassNotes()
    reconcile(look(str(root), settings), notes, assume_quiet=True)
    remove(place)
    went = reconcile(look(str(root), settings), notes, assume_quiet=True)
    assert went.next_in is not None
    if time.monotonic() < max(notes.gone.values()) + 0.5:
        assert not (root / "_ckptguard" / FOLDER).exists()
    deadline = time.monotonic() + 60.0
    while not (root / "_ckptguard" / FOLDER).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
        reconcile(look(str(root), settings), notes, assume_quiet=True)
    assert reconcile(look(str(root), settings), notes).next_in is None
