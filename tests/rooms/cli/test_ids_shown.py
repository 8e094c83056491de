"""A path says which checkpoint is meant. Ids are shown only where several contents were saved under one name."""

import re

import pytest
from support.runs import write_torch

from ckptguard.values.ids import CheckpointId

_ID = re.compile(r"(?<![\w.])(?:\d+|-)\.[1-9]\d*(?![\w.]| [A-Z]?i?B)")


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify",),
        ("list",),
        ("status",),
        ("prune", "--keep-last", "1", "--dry-run"),
        ("rollback", "--dry-run", "--force"),
        ("scrub", "--max-age", "0"),
        ("bisect",),
    ],
    ids=" ".join,
)
def test_names_that_were_saved_once_have_no_ids(invoke, verified, flip, arguments):
    """Not in what is printed of a run, also where something is damaged."""
    flip(verified / "net-100.pt")
    invoke("verify", verified)
    found = invoke(arguments[0], verified, *arguments[1:])
    assert "net-" in found.output
    assert _ID.findall(found.output.replace(str(verified), "RUN")) == []


@pytest.fixture
def saved_twice(invoke, root):
    """A fixed name with two contents, both on record."""
    for seed in (1, 2):
        write_torch(root, 1, seed=seed)
        (root / "net-1.pt").replace(root / "last.pt")
        if seed == 1:
            write_torch(root, 7, seed=7)
        assert invoke("verify", root).exit_code == 0
    return root


def test_a_name_that_was_saved_again_says_which_save_is_meant(invoke, saved_twice):
    """In words; list has the ids, which other commands take."""
    assert "last.pt (save 2)" in invoke("verify", saved_twice).stdout
    shown = invoke("show", saved_twice / "last.pt").stdout
    assert re.search(r"^save: +2$", shown, re.MULTILINE)
    listed = invoke("list", saved_twice).stdout
    assert "ID" in listed.splitlines()[0]
    assert "-.2" in listed


def test_which_save_is_said_behind_the_path():
    """Nothing for the first."""
    assert CheckpointId("last.pt", None, 1).nth_save == ""
    assert CheckpointId("last.pt", None, 4).nth_save == " (save 4)"


def test_a_history_of_verdicts_is_no_count(invoke, verified, flip):
    """One verdict is said once; several in their order, in words."""
    assert "so far" not in invoke("show", verified / "net-100.pt").stdout
    flip(verified / "net-100.pt")
    invoke("verify", verified)
    assert re.search(
        r"^verdicts so far: +good, then bad$", invoke("show", verified / "net-100.pt").stdout, re.MULTILINE
    )
