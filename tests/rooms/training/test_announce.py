"""A training says in one line where it begins, also where nobody set up logging."""

import logging

import pytest
from support.guards import guard_of

from ckptguard.training.announce import announce
from ckptguard.training.ranks import Ranks


def test_a_training_says_where_it_begins(tmp_path, capsys):
    """First that there is nothing to go on from, then which checkpoint it resumes from."""
    for _ in range(2):
        with guard_of(tmp_path / "run") as guard:
            for _ in guard.steps([1, 2], total=guard.step + 2, save_every=2):
                guard.observe(loss=1.0)
    first, second = (line for line in capsys.readouterr().err.splitlines() if line.startswith("ckptguard: "))
    assert first == f"ckptguard: there is no good checkpoint in {tmp_path}/run yet: training starts from scratch"
    path = f"{tmp_path}/run/step-000000002"
    assert second == f"ckptguard: training resumes at step 2 from {path}, which was verified"


def test_only_the_first_rank_says_so(tmp_path, capsys, monkeypatch):
    """The others would repeat it."""
    guard = guard_of(tmp_path / "run")
    monkeypatch.setattr(Ranks, "rank", 1)
    guard.resume()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_who_sets_a_level_for_us_gets_no_line_beside_the_log(caplog, capsys, level):
    """Nobody reads the same line twice, and WARNING for the logger ckptguard means that nothing else is wanted."""
    with caplog.at_level(level, logger="ckptguard"):
        announce("it begins")
    assert ("ckptguard: it begins" in caplog.messages) is (level == logging.INFO)
    assert capsys.readouterr().err == ""


def test_a_process_without_stderr_goes_on(monkeypatch):
    """A service may have none, or one that is closed."""
    monkeypatch.setattr("sys.stderr", None)
    announce("it begins")
    closed = open("/dev/null", "w")  # noqa: SIM115 - closed on purpose
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    announce("it begins")
