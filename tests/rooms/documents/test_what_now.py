"""Each finding says what to do now, and that suits the place: a download, a run with a good checkpoint, one without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckptguard
from ckptguard.checks.schema import QUESTION, UNCLEAR_SAVE
from ckptguard.cli.entry import COMMANDS
from ckptguard.documents.report_lines import ANSWERS, what_now
from ckptguard.runs.results import Checked, VerifyReport
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import PLUGIN, UNDERSTOOD, Finding, Outcome, Severity

PLACES = ("download", "run", "run without a good one")
IN_RUNS = {QUESTION, UNCLEAR_SAVE, "incident"}  # a doubt by what is on record
GO_BACK = {"structure", "completeness", "same-save", "zeros", "digests", "finite", "stale", "drift", "schema"}


def report(place: str, *findings: Finding, step: int = 70) -> VerifyReport:
    """What verification says of one checkpoint at a place."""
    in_run = place != "download"
    checked = Checked(
        path=f"step-{step}.pt",
        series="step-#.pt",
        layout="file",
        step=step,
        id=CheckpointId("step-#.pt", step, 1) if in_run else None,
        outcome=Outcome.BAD,
        digest_origin=None,
        bytes=1,
        seconds=None,
        findings=findings,
    )
    return VerifyReport(
        target="/r",
        kind="run" if in_run else "file",
        checkpoints=(checked,),
        run="/r" if in_run else None,
        known_good=("step-60.pt", CheckpointId("step-#.pt", 60, 1)) if place == "run" else None,
    )


def test_the_table_has_every_check() -> None:
    """Every name that the source gives a finding."""
    text = "".join(path.read_text() for path in Path(ckptguard.__file__).parent.rglob("*.py"))
    named = set(re.findall(r"Finding(?:\(|,)\s*\"([a-z-]+)\"", text)) | {QUESTION, UNCLEAR_SAVE, UNDERSTOOD, PLUGIN}
    assert len(named) > 12
    assert named <= set(ANSWERS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("severity", [Severity.ERROR, Severity.SICKNESS, Severity.WARNING])
@pytest.mark.parametrize("check", [*ANSWERS, f"{PLUGIN}:a rule"])
def test_what_weighs_says_what_to_do(check: str, severity: Severity, place: str) -> None:
    """With commands that exist; a download is no run, and without a good checkpoint nobody is sent back to one."""
    if place == "download" and severity is not (Severity.ERROR if check == QUESTION else None) and check in IN_RUNS:
        pytest.skip("a download has no records")
    found = Finding(check, severity, "m", "step-70.pt", found="posix.system" if check == "pickle-safety" else None)
    if check == "pickle-safety" and severity is not Severity.ERROR:
        found = Finding(check, severity, "m", "step-70.pt", found="a.B", count=1)
    said = what_now(report(place, found))
    assert said
    assert "{}" not in "".join(said)
    commands = re.findall(r"ckptguard ([a-z-]+)", "".join(said))
    assert set(commands) <= set(COMMANDS)
    if place == "download":
        assert not {"rollback", "repair", "clear", "accept", "reseal", "list", "incident"}.intersection(commands)
    else:
        assert not any("download" in one for one in said)
    if place == "run without a good one":
        assert "rollback" not in commands
    if place == "run" and severity is Severity.ERROR and check in GO_BACK | {"pickle-safety"}:
        assert "go back to step-60.pt: ckptguard rollback /r" in " ".join(said)


@pytest.mark.parametrize("check", sorted(GO_BACK))
def test_what_is_older_than_the_known_good_needs_no_going_back(check: str) -> None:
    """A resume takes the newer one."""
    said = what_now(report("run", Finding(check, Severity.ERROR, "m", "step-50.pt"), step=50))
    assert "resume from step-60.pt, which is newer and good" in said[0]
    assert "rollback" not in "".join(said)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_every_hostile_file_is_named(count: int) -> None:
    """Once, to be deleted, and nothing else is said of it."""
    names = [f"{number}.pt" for number in range(count)]
    findings = [Finding("structure", Severity.SICKNESS, "it calls x", name) for name in names]
    findings += [Finding("pickle-safety", Severity.ERROR, "m", name, found="posix.system") for name in names]
    (said,) = what_now(report("download", *findings))
    assert said.startswith("delete ")
    assert said.endswith(": loading runs code")
    assert set(re.findall(r"[0-9]+\.pt", said)) == set(names)
