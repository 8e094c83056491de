"""Kept copies are promoted and released by what their marks say, and not by one reading that was wrong."""

import itertools
import shutil

import pytest
from support.kept_runs import guarded
from support.views import look

from ckptguard.records import kept
from ckptguard.upkeep.settle_kept import settle_kept


@pytest.mark.parametrize("number", range(4))
def test_a_mark_that_reads_wrong_once_releases_nothing(root, monkeypatch, number):
    """Whichever byte of a mark reads wrong, at whichever reading, its copy stays."""
    run = guarded(root)
    for step in (100, 200):
        shutil.rmtree(root / f"sharded-{step}")  # rotated away: the copies are all that is left
    copies = kept.list_kept(run)
    real = kept.read_record
    length = len(real(run, kept.kept_folder(copies[0]) + ".json"))
    for place in range(0, length, 7):
        readings = itertools.count()

        def wrong(run, key, place=place, readings=readings):
            text = real(run, key)
            if text is None or next(readings) != number:
                return text
            return text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :] if place < len(text) else text

        with monkeypatch.context() as faulty:
            faulty.setattr(kept, "read_record", wrong)
            settle_kept(look(run))
        assert kept.list_kept(run) == copies, f"byte {place}"
