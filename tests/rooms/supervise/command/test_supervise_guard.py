"""Supervise over a training with a real guard: whatever that sees to is left to it."""

from pathlib import Path

import pytest
from supervised_training import starts

from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good

SCRIPT = Path(__file__).with_name("train_guard.py")


@pytest.fixture
def train(supervise, run):
    """Supervise the guarded training."""
    pytest.importorskip("torch")
    return lambda how: supervise(f"os.execv(sys.executable, [sys.executable, {str(SCRIPT)!r}, str(run), {how!r}])")


def test_what_a_guard_mends_is_mended_once(train, run):
    """It goes back by itself, and trains to the end: nothing is stopped, and nothing goes back a second time."""
    done = train("once")
    assert (done.code, starts(run)) == (0, ["0"]), done.stderr
    [incident] = list_incidents(open_run(str(run)))
    assert (incident.source, incident.state, incident.known_good) == ("guard", "closed", "4.1")
    assert find_known_good(open_run(str(run))).step == 8
    said = [line for line in done.stderr.splitlines() if line.startswith("ckptguard: ")]
    # All of it is the guard's own: its start, what it saw, and where it went.
    starts_with = ("there is no good checkpoint in ", "step 5: ", "went back from step 5 to step 4, ")
    assert len(said) == len(starts_with)
    assert all(line.startswith(f"ckptguard: {words}") for line, words in zip(said, starts_with, strict=True))


def test_where_a_guard_gives_up_the_command_is_not_started_again(train, run):
    """It went back as often as its own budget allows: as often again, for each start, would change nothing."""
    done = train("always")
    assert (done.code, starts(run)) == (1, ["0"]), done.stderr
    assert "the guard inside of it gave up" in done.stderr
    incidents = list_incidents(open_run(str(run)))
    assert [i.source for i in incidents] == ["guard"] * 4
    assert {i.state for i in incidents} == {"closed"}
    assert find_known_good(open_run(str(run))).step is not None
