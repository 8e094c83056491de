"""-q: what is well is not said, what is wrong is."""

from __future__ import annotations

import pytest
from support.runs import write_torch


@pytest.mark.parametrize("words", [("verify",), ("scrub",), ("list",), ("repair",), ("prune", "--keep-last", "2")])
def test_all_is_well_and_nothing_is_said(verified, invoke, words):
    """As cron wants it: neither output nor code."""
    result = invoke(*words, verified, "--quiet")
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize("words", [("pin",), ("unpin",), ("reseal",)])
def test_what_is_done_to_one_checkpoint(verified, invoke, words):
    """It was done, as the exit code says."""
    invoke("pin", verified / "net-100.pt")
    result = invoke(*words, verified / "net-100.pt", "-q")
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize("name", ["verify", "list", "scrub"])
def test_what_is_wrong_is_said(verified, invoke, flip, name):
    """The damaged checkpoint, and not those that are good."""
    flip(verified / "net-200.pt")
    if name == "list":
        invoke("verify", verified)
    result = invoke(name, "-q", verified)
    assert "net-200.pt" in result.stdout
    assert "net-100.pt" not in result.stdout
    assert result.exit_code == (0 if name == "list" else 3)


def test_errors_are_said(invoke, root):
    """On stderr, as ever."""
    assert "error: " in invoke("verify", "-q", root / "absent").stderr


def test_json_is_the_answer_all_the_same(document, verified):
    """Who asks for a document gets it."""
    assert document("verify", "-q", verified)[1]["outcome"] == "good"


def test_one_command_does_not_hush_the_next(invoke, three):
    """-q is of one command line."""
    invoke("verify", "-q", three)
    write_torch(three, 400, seed=400)
    assert "net-400.pt" in invoke("verify", three).stdout
