"""What a pass judged is in its answer, whatever fails after it: no later pass would tell of it."""

import pytest
from support.views import look

from ckptguard.errors import StorageError, TransientError
from ckptguard.upkeep.reconcile import PassNotes, reconcile


@pytest.fixture
def copies_fail(monkeypatch):
    """Have a listing fail when the pass comes to the copies."""

    def fail(view, **_):
        raise TransientError("kept: stale file handle", key="kept")

    monkeypatch.setattr("ckptguard.upkeep.reconcile.finish_copies", fail)


def test_verdicts_are_told_although_the_rest_of_the_pass_fails(three, copies_fail):
    """The trouble is told too; a pass that judged nothing fails as a whole."""
    notes = PassNotes()
    done = reconcile(look(three), notes)
    assert [c.step for c in done.checked] == [100, 200, 300]
    assert done.could_not_tell == ("kept: stale file handle",)
    with pytest.raises(StorageError):
        reconcile(look(three), notes)
