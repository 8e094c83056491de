"""The report as a page and as text: complete in itself, harmless whatever a record holds, and never cut wrongly."""

import math
import re

import msgspec
import pytest
from support.html_page import Page

from ckptguard.reporting.causes import likely_causes
from ckptguard.reporting.report_html import HEIGHT, WIDTH, Axis, curve_svg, report_html
from ckptguard.reporting.report_text import report_text
from ckptguard.values.incident import (
    ChangedTensor,
    CheckpointFacts,
    Details,
    IncidentReport,
    Magnitude,
    Resumed,
    Sample,
    SickTensor,
    Training,
)

EVIL = "<script>alert(1)</script>\"'&\x1b[31m\u202e"


def samples(count=40):
    """Updates that end badly."""
    rows = [Sample(100 + n, 2.0, 0.5, 1024.0, 1e-4) for n in range(count)]
    return (*rows, Sample(100 + count, "nan", "inf", 512.0, 1e-4))


def report(name="layer.weight", **changed):
    """A report with something in every section."""
    good = CheckpointFacts(
        path=name,
        step=120,
        id="120.1",
        outcome="good",
        largest=tuple(Magnitude(f"{name}{n}", 10.0**n, "F16") for n in range(-6, 14)),
    )
    full = IncidentReport(
        run=name,
        id="20260131T120000-0a1b2c3d",
        opened_at="2026-01-31T12:00:00Z",
        step=140,
        cause="grad_norm",
        reason=name,
        state="closed",
        source=name,
        actions=(f"went back to {name}",),
        known_good="120.1",
        evidence={name: name, "list": [1, name]},
        details=Details(
            onset=139,
            samples=samples(),
            training=Training(dtypes={name: 5}, optimizer=name, versions={name: name}, world_size=2),
            resumed=Resumed(step=1, path=name, missing=(name,), world_size=4),
            tensors=tuple(SickTensor(name=f"{name}{n}", kind="weight", nan=1, inf=2, elements=9) for n in range(30)),
            tensors_omitted=5,
            tensors_from=name,
            last_good=good,
            first_bad=msgspec.structs.replace(good, step=130, id="130.1", outcome="bad"),
            changes=(
                ChangedTensor(name=f"{name} became", role="model", change="changed", elements=9, became_nonfinite=2),
                ChangedTensor(name=f"{name} grew", role=name, change="changed", relative_l2=0.5, largest=32752.0),
                ChangedTensor(name=f"{name} was 0", role="model", change="retyped", relative_l2="inf", note=name),
            ),
            changes_omitted=77,
            changes_note=name,
        ),
    )
    full = msgspec.structs.replace(full, **changed)
    if not full.details.causes:
        full = msgspec.structs.replace(full, details=msgspec.structs.replace(full.details, causes=likely_causes(full)))
    return full


def test_the_page_needs_nothing_but_itself():
    """No script, no link, no address of any kind; a policy that forbids them anyway."""
    text = report_html(report())
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= {
        "html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "article", "details",
        "summary", "figure", "figcaption", "h1", "h2", "h3", "p", "span", "code", "small", "dl", "div", "dt", "dd",
        "ul", "ol", "li", "table", "thead", "tr", "th", "td", "i", "svg", "line", "text", "circle", "polyline",
    }  # fmt: skip
    attributes = {name for _, own in page.tags for name in own}
    assert not attributes & {"src", "href", "xlink:href", "onload", "onclick", "srcset", "action"}
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "<style>\n:root{" in text
    assert "://" not in text


def test_everything_from_a_file_is_escaped():
    """A name that tries to be markup, a terminal sequence or a direction mark is shown as what it is."""
    text = report_html(report(EVIL, cause=EVIL, state=EVIL, opened_at=EVIL, id=EVIL, known_good=EVIL))
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "&lt;script&gt;" in text
    Page(text)
    shown = report_text(report(EVIL, cause=EVIL, state=EVIL, opened_at=EVIL, id=EVIL, known_good=EVIL))
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_page_and_text_say_the_same():
    """Causes, onset, tensors and what was done are in both, and what is left out is counted."""
    one = report()
    for text in (" ".join(Page(report_html(one)).words), report_text(one)):
        words = " ".join(text.split())
        for expected in ("139", "step 120", "went back to layer.weight", one.details.causes[0].title, "and 23 more"):
            assert expected in words
        assert "120.1" not in words  # the path says it


def test_what_changed_is_in_both():
    """How much became non-finite, how far the others moved, and how near fp16's end they were before."""
    one = report()
    for text in (" ".join(Page(report_html(one)).words), report_text(one)):
        words = " ".join(text.split())
        for expected in ("2 of 9 became NaN or Inf", "changed by 50.00%", "50.00%", "retyped, from zero", "77 more"):
            assert expected in words, expected


def test_an_onset_long_ago_is_shown_with_its_neighbours():
    """The text shows the updates around the onset, a gap, and the last two."""
    rows = tuple(Sample(n, 1.0) for n in range(1, 101))
    text = report_text(report(step=100, details=Details(onset=40, samples=rows)))
    shown = [line for line in text.splitlines() if line.strip().endswith(" 1") or "<- onset" in line or "..." in line]
    assert [line.split()[0] for line in shown if line.strip()] == [*map(str, range(34, 44)), "...", "99", "100"]
    assert "40     1  <- onset" in text


def test_an_empty_report_is_a_page_too():
    """What an incident knows at least is enough."""
    bare = IncidentReport(
        run="r",
        id="i",
        opened_at="?",
        step=None,
        cause="numeric",
        reason="",
        state="open",
        source="cli",
        actions=(),
        known_good=None,
        evidence={},
        details=Details(),
    )
    assert "nothing has been done" in report_text(bare)
    assert "ckptguard rollback r" in " ".join(Page(report_html(bare)).words)


@pytest.mark.parametrize(
    "values",
    [
        [1e308, -1e308, 0.0],
        [float("nan")] * 5,
        [5e-324, 1e308],
        [0.0],
        [3.0] * 1000,
        [],
        [float("inf"), 1.0, float("-inf")],
        [2.0**k for k in range(-40, 40)],
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_curves_stay_in_their_picture(values, log):
    """Whatever the numbers are, every point is a finite place inside the picture."""
    points = list(enumerate(values))
    axis = Axis(span=(0, max(1, len(values) - 1)), onset=3, good=1)
    drawn = curve_svg(points, axis, label="Loss", log=log)
    Page(drawn)
    assert "nan," not in drawn
    for attribute, limit in (
        ("x1", WIDTH),
        ("x2", WIDTH),
        ("cx", WIDTH),
        ("y1", HEIGHT),
        ("y2", HEIGHT),
        ("cy", HEIGHT),
    ):
        for found in re.findall(rf' {attribute}="([^"]*)"', drawn):
            assert 0 <= float(found) <= limit
    for pairs in re.findall(r'points="([^"]*)"', drawn):
        for pair in pairs.split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT
    assert drawn.count('class="sick"') == sum(not math.isfinite(v) for v in values)


def test_marks_outside_of_the_curve_are_not_drawn():
    """A last good checkpoint long before the first sample is not marked, and not in the legend."""
    far = CheckpointFacts(path="c", step=3, id="3.1", outcome="good")
    text = report_html(report(details=Details(onset=139, samples=samples(), last_good=far)))
    assert 'class="mark onset"' in text
    assert 'class="mark good"' not in text
    assert '<span class="k good">' not in text


def test_gave_up_does_not_look_mended():
    """Green is for what was mended: an incident that was closed without a way back is not."""
    assert '<header class="repaired">' in report_html(report())
    assert '<header class="repaired">' not in report_html(report(known_good=None))
