"""What `verify` answers with: for people as the command line says it, in notebooks a table without anybody's markup."""

from __future__ import annotations

import html
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.html_page import Page
from support.runs import write_torch

import ckptguard
from ckptguard.api.report import Report
from ckptguard.runs.results import Checked
from ckptguard.values.verdict import Finding, Outcome, Severity

NAMES = st.text(max_size=12) | st.sampled_from(
    ["<script>alert(1)</script>", "a&b", 'x" onmouseover="y', "</td><td>", "\u202egnp", "\x1b[31m", "{{7*7}}", "a'b"]
)


def checked(path: str, outcome: Outcome, findings: tuple[Finding, ...] = ()) -> Checked:
    """A checkpoint of this name and outcome."""
    return Checked(
        path=path,
        series="s",
        layout="file",
        step=1,
        id=None,
        outcome=outcome,
        digest_origin=None,
        bytes=1500,
        seconds=None,
        findings=findings,
    )


def test_it_prints_what_the_command_line_prints(verified: Path, invoke, flip) -> None:
    """Of good and of damaged checkpoints, of a run and of a stray file."""
    flip(verified / "net-200.pt")
    stray = verified.parent / write_torch(verified.parent, 7, seed=1)
    for target in (verified, verified / "net-200.pt", stray):
        said = invoke("verify", target, "--no-record").stdout
        assert str(ckptguard.verify(target, record=False)) + "\n" == said


def test_damage_that_is_found_is_an_incident_as_on_the_command_line(verified: Path, invoke, flip) -> None:
    """Opened once, and told at the end of what is printed."""
    flip(verified / "net-200.pt")
    first = str(ckptguard.verify(verified))
    (incident,) = ckptguard.incidents(verified)
    assert incident.source == "api"
    assert first + "\n" == invoke("verify", verified).stdout
    assert len(ckptguard.incidents(verified)) == 1


def test_a_report_is_true_only_if_all_is_good() -> None:
    """Nothing checked, something unread, or anything but good: not ok."""
    good, other = checked("a", Outcome.GOOD), checked("b", Outcome.PENDING)
    assert Report(target="t", kind="run", checkpoints=(good,))
    assert Report(target="t", kind="run", checkpoints=(good,)).ok
    assert not Report(target="t", kind="run", checkpoints=())
    assert not Report(target="t", kind="run", checkpoints=(good, other))
    assert not Report(target="t", kind="run", checkpoints=(good,), could_not_tell=True)
    for outcome in set(Outcome) - {Outcome.GOOD}:
        assert not Report(target="t", kind="run", checkpoints=(good, checked("c", outcome))).ok


def test_an_outcome_is_its_word() -> None:
    """A script may compare it with text, and print it."""
    report = Report(target="t", kind="run", checkpoints=(checked("b", Outcome.BAD),))
    assert report.outcome == "bad"
    assert f"{report.outcome}" == "bad"


@given(
    target=NAMES,
    path=NAMES,
    note=NAMES,
    findings=st.lists(
        st.builds(
            Finding,
            check=NAMES,
            severity=st.sampled_from(list(Severity)),
            message=NAMES,
            file=st.none() | NAMES,
            tensor=st.none() | NAMES,
        ),
        max_size=4,
    ),
)
def test_nothing_from_a_file_is_markup(target: str, path: str, note: str, findings: list[Finding]) -> None:
    """Whatever names say, the tags and attributes are ours, and no control character is left."""
    one = checked(path, Outcome.BAD, tuple(findings))
    page = Report(target=target, kind="file", checkpoints=(one,), notes=(note,))._repr_html_()
    plain = Report(target="t", kind="file", checkpoints=(checked("p", Outcome.BAD),))._repr_html_()
    found, ours = Page(page), Page(plain)
    ours_and_breaks = [*ours.tags, ("br", {})]
    assert all(tag in ours_and_breaks for tag in found.tags)
    assert not any(ord(c) < 32 or c == "\u202e" for c in "".join(found.words))


def test_a_table_says_what_the_lines_say(verified: Path, flip) -> None:
    """Path, outcome and finding of a damaged checkpoint are in it."""
    flip(verified / "net-200.pt")
    report = ckptguard.verify(verified, record=False)
    page = Page(report._repr_html_())
    text = "".join(page.words)
    assert page.tags.count(("tr", {})) == 1 + len(report.checkpoints)
    for one in report.checkpoints:
        assert one.path in text
        assert one.outcome in text
    (bad,) = [c for c in report.checkpoints if c.outcome == "bad"]
    assert any(f.message in text for f in bad.findings)
    assert html.escape(str(verified)) in report._repr_html_()
