"""Exit codes: one table, told everywhere in the same words."""

import re
from pathlib import Path

import pytest

from ckptguard import errors
from ckptguard.cli.entry import COMMANDS
from ckptguard.values.exit_codes import ExitCode, of_error, of_outcomes
from ckptguard.values.verdict import Outcome

ROOT = Path(__file__).resolve().parents[3]
G, B, S, I, P = Outcome.GOOD, Outcome.BAD, Outcome.SUSPECT, Outcome.INCOMPLETE, Outcome.PENDING  # noqa: E741


@pytest.mark.parametrize(
    ("outcomes", "could_not_tell", "code"),
    [
        ([G, G], False, 0),
        ([G, B, P], False, 3),
        ([B], True, 3),
        ([G, P], True, 1),
        ([I, G], True, 1),
        ([G, I], False, 4),
        ([S], False, 4),
        ([P], False, 4),
        ([], False, 4),
    ],
)
def test_the_first_code_that_applies_wins(outcomes, could_not_tell, code):
    """Bad outweighs unreadable, unreadable outweighs undecided, and nothing checked is not all good."""
    assert of_outcomes(outcomes, could_not_tell=could_not_tell) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SettingsError("x"), 2),
        (errors.NotFoundError("x"), 10),
        (errors.BusyError("x"), 11),
        (errors.RollbackExhausted("x"), 12),
        (errors.NoKnownGoodError("x"), 13),
        (errors.RefusedError("x", outcome="bad"), 3),
        (errors.RefusedError("x", outcome="suspect"), 4),
        (errors.RefusedError("x", outcome="good"), 2),
        (errors.StorageFullError("x", key="k"), 1),
        (errors.RecordsError("x"), 1),
        (errors.CouldNotTellError("x"), 1),
    ],
)
def test_every_error_has_its_code(error, code):
    """The class of an error decides the code."""
    assert of_error(error) == code


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_its_exit_codes(invoke, name):
    """Each command's --help names the codes it can end with, with the table's meanings."""
    result = invoke(name, "--help")
    assert result.exit_code == 0
    told = result.stdout.partition("Exit codes:")[2]
    codes = {int(c): m for c, m in re.findall(r"^ +(\d+) +(.+)$", told, re.MULTILINE)}
    assert {0, 1, 2, 130} <= set(codes)
    assert all(ExitCode(code).meaning == meaning for code, meaning in codes.items())
