"""What an error says to run can be pasted, also where a run's name has a space."""

from __future__ import annotations

import shlex

import pytest
from support.runs import write_torch


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        (("known-good", "{}"), "ckptguard-daemon --once {}"),
        (("incident", "{}"), "ckptguard verify {}"),
        (("rollback", "{}", "--step", "7"), "ckptguard list {}"),
        (("sums", "{}"), "ckptguard list {}"),
    ],
)
def test_a_run_with_a_space_is_quoted(invoke, root, words, advised):
    """As a shell needs it."""
    run = root / "my run"
    run.mkdir()
    write_torch(run, 1, seed=1)
    write_torch(run, 2, seed=2)
    result = invoke(*(word.format(run) for word in words))
    assert result.exit_code
    assert advised.format(shlex.quote(str(run))) in result.stderr
