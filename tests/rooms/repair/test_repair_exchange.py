"""A repaired file takes the name of the damaged one, and nobody's save is lost by it."""

import os

import pytest
from support.faults import flip
from support.kept_runs import SECOND, contents, guarded, in_quarantine, leftovers, outcomes
from support.views import look

from ckptguard.errors import BusyError
from ckptguard.repair import one_place
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import scrub


@pytest.mark.parametrize("moment", ["before the move", "after the move"])
def test_a_save_that_comes_between_wins(root, monkeypatch, moment):
    """The trainer saves the file again while it is repaired: its bytes stay, whichever moment it chose."""
    run = guarded(root)
    flip(root / SECOND)
    scrub(look(run))
    new = b"saved again by the trainer"
    real = one_place._move_aside

    def raced(run, damaged, aside):
        if moment == "before the move":
            (root / "new").write_bytes(new)
            os.replace(root / "new", root / SECOND)
        real(run, damaged, aside)
        (root / SECOND).write_bytes(new)

    monkeypatch.setattr(one_place, "swap_files", lambda *_: False)
    monkeypatch.setattr(one_place, "_move_aside", raced)
    with pytest.raises(BusyError):
        repair(look(run), "sharded-200")
    assert (root / SECOND).read_bytes() == new
    assert outcomes(run)[-1] == "bad"
    assert leftovers(root) == []


def test_a_save_that_comes_before_the_exchange_wins(root, monkeypatch):
    """What is taken out is looked at, and put back if it is not what was damaged."""
    run = guarded(root)
    flip(root / SECOND)
    scrub(look(run))
    new, real = b"saved again by the trainer", one_place.swap_files

    def raced(*where):
        monkeypatch.setattr(one_place, "swap_files", real)
        (root / "new").write_bytes(new)
        os.replace(root / "new", root / SECOND)
        return real(*where)

    monkeypatch.setattr(one_place, "swap_files", raced)
    with pytest.raises(BusyError):
        repair(look(run), "sharded-200")
    assert (root / SECOND).read_bytes() == new
    assert (in_quarantine(root), leftovers(root)) == ([], [])


def test_the_name_is_never_free(root, monkeypatch):
    """Where the file system exchanges two files: before and after the one step that changes the name it is taken."""
    run = guarded(root)
    whole = contents(root)
    flip(root / SECOND)
    harmed = (root / SECOND).read_bytes()
    scrub(look(run))
    seen, real = [], one_place.swap_files

    def watched(*where):
        seen.append((root / SECOND).read_bytes() == harmed)
        swapped = real(*where)
        seen.append(swapped and (root / SECOND).read_bytes() == whole[SECOND])
        return swapped

    (root / "a").write_bytes(b"1")
    (root / "b").write_bytes(b"2")
    can = real(str(root), "a", "b")
    assert ((root / "a").read_bytes(), (root / "b").read_bytes()) == ((b"2", b"1") if can else (b"1", b"2"))
    monkeypatch.setattr(one_place, "swap_files", watched)
    repair(look(run))
    assert contents(root) == whole
    assert in_quarantine(root) == [harmed]
    assert seen == [True, can]
