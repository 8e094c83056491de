"""Presence in replicas: what changed there is read before it counts as there, or is answered."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from support.tiny_run import TINY, WEIGHTS, cycle, inline, name_of, poison, save
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.replicas.replicate import find_known_good_anywhere, replica_states, replicate
from ckptguard.runs.find_known_good import ANY, find_known_good
from ckptguard.runs.work import Work
from ckptguard.verification.read_known_good import read_known_good


@pytest.fixture
def pair(tmp_path):
    """A run of two good checkpoints, and its replica."""
    root, place = tmp_path / "run", tmp_path / "elsewhere"
    for step in (100, 200):
        save(str(root), step, step)
    run = open_run(str(root))
    cycle(run, TINY.changed(keep="none"))
    replicate(look(run), str(place))
    return root, place


def test_what_changed_in_a_replica_is_read_before_it_counts_as_there(pair):
    """A touched file is read back once and nothing is sent; one of other bytes is sent again."""
    root, place = pair
    (place / name_of(200) / WEIGHTS).touch()
    replica = open_run(str(place))
    assert str(find_known_good(replica).id) == "100.1"
    assert {(c.done, c.sent) for c in replicate(look(str(root)), str(place)).checkpoints} == {("there", 0)}
    assert str(find_known_good(replica).id) == "200.1"
    poison(place / name_of(200) / WEIGHTS)
    done = {str(c.id): c.done for c in replicate(look(str(root)), str(place)).checkpoints}
    assert done == {"200.1": "sent", "100.1": "there"}
    saved, there = (Path(folder, name_of(200), WEIGHTS).read_bytes() for folder in pair)
    assert hashlib.md5(saved).digest() == hashlib.md5(there).digest()


def test_a_changed_checkpoint_is_answered_from_its_replica(pair):
    """What changed in the run counts as lost for who does not read; who does, learns what it is."""
    root, place = pair
    poison(root / name_of(200) / WEIGHTS)
    replicated = TINY.changed(replicas=(str(place),))
    answer = find_known_good_anywhere(look(str(root), replicated))
    assert (answer.place, answer.path) == ("replica", str(place / name_of(200)))
    poison(place / name_of(200) / WEIGHTS)
    assert str(find_known_good_anywhere(look(str(root), replicated)).id) == "100.1"
    work = Work(scanner=inline)
    read = find_known_good_anywhere(
        look(str(root), replicated), ANY, lambda view, wanted: read_known_good(view, wanted, work, everything=True)
    )
    assert (read.place, str(read.id)) == ("in place", "100.1")


def test_an_impossible_place_is_trouble_and_not_behind(pair, tmp_path):
    """A place that is not there yet is behind; one below a file can never be."""
    (tmp_path / "file").write_text("")
    places = (str(tmp_path / "file" / "replica"), str(tmp_path / "new" / "replica"))
    impossible, new = replica_states(look(str(pair[0]), TINY.changed(replicas=places)))
    assert impossible.trouble == f"there can be no replica at {places[0]}: {tmp_path / 'file'} is not a folder"
    assert (impossible.behind, new.behind, new.trouble) == (None, 2, None)
