"""How a trainer saves again under one name decides whether a link is as safe as a copy."""

import itertools

import pytest
from support.runs import QUICK, save_file, state_dict
from support.views import look

from ckptguard.keep.saved_over import keeps_old_bytes
from ckptguard.records.run import open_run
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
