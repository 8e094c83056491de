"""What is said about versions is true: the bounds of pyproject.toml, and the table that `dev.py matrix` makes."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from support.matrix import PAGE, PARTS, ROWS, tried

TABLE = PAGE.read_text(encoding="utf-8").partition("## What was tried")[2]
LINES = {
    name: [cell.strip() for cell in rest.split("|")]
    for name, rest in re.findall(r"^\| ([^|-]+) \|(.*)\|$", TABLE, re.MULTILINE)
}
TOO_OLD = {"torch 2.4", "older frameworks"}  # the page says what does not work there

# A Trainer of several processes cannot resume on CPUs there: it asks torch for the device "cpu:0".
EXPLAINED = {("oldest frameworks", "Trainer"): "88 passed, 1 failed"}


def test_the_table_has_every_row() -> None:
    """And of each row how each of its parts ended, or that it was not tried."""
    assert LINES.keys() == {"row", *ROWS}
    for name, row in ROWS.items():
        python, packages, *counts = LINES[name]
        assert python.startswith(row.python)
        said = {part for part, count in zip(PARTS, counts, strict=True) if re.search("passed|failed|not tried", count)}
        assert said == set(row.parts) or packages.startswith("not tried: ")


@pytest.mark.parametrize("name", sorted(ROWS.keys() - TOO_OLD))
def test_what_is_said_to_work_did(name: str) -> None:
    """No test failed in the rows that stand for what we support, but for what the page explains."""
    counts = dict(zip(PARTS, LINES[name][2:], strict=True))
    failed = {part for part, count in counts.items() if "failed" in count and EXPLAINED.get((name, part)) != count}
    assert failed == set()


@pytest.mark.versions
@pytest.mark.skipif(not os.environ.get("CI"), reason="CI installs it; by hand: python dev.py matrix")
@pytest.mark.skipif(shutil.which("python3.11") is None, reason="no Python 3.11 here")
@pytest.mark.timeout(1800)
def test_our_requirements_work_at_their_lower_bounds(tmp_path: Path) -> None:
    """One old row, for each change: an environment of its own, with each requirement at its lower bound. Its daemon is
    tried by hand: those tests start many processes, which has no room beside the others."""
    parts = ("readers", "stores")
    found = dict(tried(ROWS["oldest requirements"], tmp_path / "home", parts))
    assert "not tried" not in found["with"]
    for part in parts:
        assert "passed" in found[part]
        assert "failed" not in found[part]
