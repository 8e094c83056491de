"""Generated trainings, small and on a real disk: after a rollback every name resumes, or nothing has changed."""

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import QUICK
from support.trainer_saves import load, save, training_state, update_of
from support.views import look

from ckptguard.errors import NoKnownGoodError
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import numbers_of

NUMBERED = "epoch_{}.pt", "recovery-0-{}.pt", "epochs/epoch-{}.pt"
FIXED = "last.pt", "other.pt", "weights/latest.pt"


class Saving(NamedTuple):
    """What a trainer does after an epoch: which names it saves to, and how."""

    names: tuple[str, ...]
    sick: bool
    in_place: bool
    loses: str | None  # a name that its rotation deletes afterwards
    seen: bool  # there is a pass of the daemon


SAVINGS = st.builds(
    Saving,
    names=st.lists(st.sampled_from((*NUMBERED, *FIXED)), min_size=1, unique=True).map(tuple),
    sick=st.booleans(),
    in_place=st.booleans(),
    loses=st.none() | st.sampled_from(("epoch_1.pt", "epochs/epoch-2.pt", "last.pt", "weights/latest.pt")),
    seen=st.booleans(),
)


def train(run, epoch, saving, counts, notes, keep):
    """One epoch of it."""
    for pattern in saving.names:
        path = run / pattern.format(epoch)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = {"epoch": epoch} if counts else {}
        if saving.in_place:
            torch.save(training_state(epoch * 10, sick=saving.sick, **beside), path)
        else:
            save(path, epoch * 10, sick=saving.sick, **beside)
    if saving.loses:
        (run / saving.loses).unlink(missing_ok=True)
    if saving.seen:
        reconcile(look(str(run), keep), notes)


def contents(run):
    """Every name and what it holds."""
    own = [p for p in run.rglob("*") if p.is_file() and "_ckptguard" not in p.parts]
    return {str(p.relative_to(run)): p.read_bytes() for p in own}


@settings(max_examples=12, deadline=None)
@given(st.lists(SAVINGS, min_size=2, max_size=5), st.booleans(), st.sampled_from(["none", "auto", "copy"]))
def test_every_name_resumes_or_nothing_has_changed(savings, counts, keep):
    """And what is gone back to is as new as anything that is good and present; going back again changes nothing."""
    folder = Path(tempfile.mkdtemp())
    try:
        kept = QUICK.changed(keep=keep, keep_good=2)
        notes = PassNotes()
        for epoch, saving in enumerate(savings, 1):
            train(folder, epoch, saving, counts, notes, kept)
        reconcile(look(str(folder), kept), notes)
        before = contents(folder)
        back = GoBack(reason="NaN", check_writing=False)
        try:
            done = roll_back(look(str(folder), kept), back)
        except NoKnownGoodError:
            assert contents(folder) == before
            return
        after = contents(folder)
        newest = update_of(load(Path(done.known_good.path)))
        assert newest > 0
        checkpoints = look(str(folder), kept).checkpoints
        for series in {c.series for c in checkpoints}:  # of a numbered one its newest counts; old ones are history
            name = max((c for c in checkpoints if c.series == series), key=lambda c: numbers_of(c.step)).path
            assert 0 < update_of(load(folder / name)) <= newest, name
        assert set(FIXED) & set(before) <= set(after), "no fixed name is lost"
        again = roll_back(look(str(folder), kept), back)
        assert (again.quarantined, again.given) == ((), ())
        assert contents(folder) == after
    finally:
        shutil.rmtree(folder)
