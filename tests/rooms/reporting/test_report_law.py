"""A report states only what its records show: evidence that was made from a known story never contradicts it."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.html_page import Page

from ckptguard.reporting.causes import advise, likely_causes
from ckptguard.reporting.onset import with_onset
from ckptguard.reporting.report_html import report_html
from ckptguard.reporting.report_text import report_text
from ckptguard.values.incident import CheckpointFacts, Details, IncidentReport, Sample, SickTensor, Training

# Nothing that a reader would have to guess at; "nan" and "inf" are words of a sample.
NEVER = re.compile(r"\bNone\b|nan%|inf%|(?<![\w-])-\.|step -|onset: *-|\d\.\d\.pt|\bids?: -|between (\d+) and \1\b")
FRAMEWORKS = ("plain", "trainer", "lightning", "deepspeed", "accelerate", "")


class Story(msgspec.Struct, frozen=True):
    """What truly happened: update `onset` was the first one that was not finite, and somebody noticed at `noticed`. Of
    the signals every `every`th was recorded, and a checkpoint was saved every `save_every` updates."""

    onset: int
    noticed: int
    every: int
    save_every: int
    source: str
    cause: str
    fixed_name: bool
    knows_last_good: bool
    knows_overflow: bool
    keeps_samples: bool
    told_onset: bool
    framework: str | None


STORIES = st.builds(
    Story,
    onset=st.integers(1, 400),
    noticed=st.integers(0, 200),  # after the onset
    every=st.integers(1, 40),
    save_every=st.integers(1, 100),
    source=st.sampled_from(["guard", "callback", "daemon", "supervise", "cli"]),
    cause=st.sampled_from(["numeric", "weights", "grad_norm"]),
    fixed_name=st.booleans(),
    knows_last_good=st.booleans(),
    knows_overflow=st.booleans(),
    keeps_samples=st.booleans(),
    told_onset=st.booleans(),
    framework=st.none() | st.sampled_from(FRAMEWORKS[:-1]),
)


def told(story: Story) -> IncidentReport:
    """What the records hold of a story."""
    noticed = story.onset + story.noticed
    steps = range(story.every, noticed + 1, story.every) if story.keeps_samples else ()
    sick = {"loss": "nan", "grad_norm": "inf"}
    samples = tuple(Sample(s, **(sick if s >= story.onset else {"loss": 2.0, "grad_norm": 0.5})) for s in steps)
    good_step = (story.onset - 1) // story.save_every * story.save_every
    name = "last.pt" if story.fixed_name else f"net-{good_step}.pt"
    good = CheckpointFacts(
        path=name, step=None if story.fixed_name else good_step, id=f"{'-' if story.fixed_name else good_step}.4",
        outcome="good",
    )  # fmt: skip
    healthy = max((s.step for s in samples if s.step < story.onset), default=0)
    about = {"checkpoint": "-.5", "series": "last.pt", "path": "last.pt"} if story.source == "daemon" else {}
    evidence: dict[str, object] = {"loss": "nan", **about}
    details = Details(
        onset=min(healthy + 1, noticed) if story.told_onset else None,
        samples=samples,
        tensors=(SickTensor(name="w", kind="weight", nan=9, inf=0, elements=9),) if story.told_onset else (),
        training=Training(framework=story.framework) if story.framework else None,
        last_good=good if story.knows_last_good and good_step > 0 else None,
    )
    report = IncidentReport(
        run="/runs/a",
        id="20260131T120000-0a1b2c3d",
        opened_at="2026-01-31T12:00:00Z",
        step=noticed,
        cause=story.cause,
        reason="the loss is not finite",
        state="open",
        source=story.source,
        actions=(),
        known_good=good.id if story.knows_last_good else None,
        evidence={**evidence, **({"first_overflow": story.onset} if story.knows_overflow else {})},
        details=details,
    )
    report = msgspec.structs.replace(report, details=with_onset(report))
    return msgspec.structs.replace(
        report, details=msgspec.structs.replace(report.details, causes=likely_causes(report))
    )


@settings(max_examples=400, deadline=None)
@given(STORIES)
def test_no_report_contradicts_what_happened(story):
    """The onset that is told holds the true one, in text and page; no word stands for what is not known."""
    report = told(story)
    first, last = report.details.onset, report.onset_last
    assert last is not None
    assert (first or 1) <= story.onset <= last + 1  # harm of an update is seen in the next one
    assert last <= story.onset + story.noticed
    page = " ".join(Page(re.sub("<style>.*</style>", "", report_html(report), flags=re.DOTALL)).words)
    for text in (report_text(report), page):
        assert not NEVER.search(text), NEVER.search(text)
        assert "went first" not in text
        assert f"{story.onset + story.noticed}" in text
        if first is not None and last - first > 0:
            assert f"between {first} and {last}" in text
    for cause in report.details.causes:
        assert cause.because
        assert cause.advice


@settings(max_examples=200, deadline=None)
@given(STORIES, st.integers(1, 20), st.integers(1, 20))
def test_records_more_than_one_update_apart_make_a_range(story, well, gap):
    """And records of every update make none."""
    onset, every = well * story.every + 1 + (gap - 1) % story.every, story.every
    seen = (well + 1) * every
    kept = {"keeps_samples": True, "knows_overflow": False, "told_onset": False, "knows_last_good": False}
    report = told(msgspec.structs.replace(story, onset=onset, noticed=seen - onset, **kept))
    assert (report.details.onset, report.onset_last) == (well * every + 1, seen)
    assert ("between" in report_text(report)) is (every > 1)


def test_between_two_logs():
    """The Trainer logs every tenth update: it was well at 20, and not at 30."""
    samples = (Sample(10, 2.0, 0.5), Sample(20, 2.0, 0.5), Sample(30, 0.0, "nan"))
    story = Story(25, 5, 10, 100, "callback", "grad_norm", True, False, False, False, False, "trainer")
    for onset in (None, 20, 21):
        bare = told(story)
        report = msgspec.structs.replace(bare, details=Details(onset=onset, samples=samples))
        report = msgspec.structs.replace(report, details=with_onset(report))
        assert "onset:     between 21 and 30\n" in report_text(report)
        assert "noticed:   step 30, at most 9 updates later, by the callback in the Trainer\n" in report_text(report)
        assert with_onset(report) == report.details  # what was concluded stays


def test_an_overflow_that_was_noted_is_the_cause_and_the_onset():
    """Somebody reports a NaN loss, and that gradients first overflowed 40 updates before."""
    story = Story(210, 40, 1, 50, "guard", "numeric", False, True, True, False, False, None)
    report = told(story)
    cause = report.details.causes[0]
    assert (cause.name, cause.confidence) == ("fp16_overflow", "likely")
    assert any("first overflowed at update 210" in said for said in cause.because)
    assert "onset:     step 210\nnoticed:   step 250, 40 updates later" in report_text(report)
    for odd in (True, "210", -1, 10_000, None, 2.5):
        other = msgspec.structs.replace(report, evidence={"first_overflow": odd}, details=Details())
        assert "fp16_overflow" not in [c.name for c in likely_causes(other)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_advice_is_in_the_words_of_the_integration(framework):
    """No loop of one's own is told of a Trainer's options, nor the other way round."""
    own = {
        "plain": ("torch.autocast(", "clip_grad_norm_(parameters"),
        "trainer": ("TrainingArguments", "max_grad_norm"),
        "lightning": ("bf16-mixed", "gradient_clip_val"),
        "deepspeed": ("DeepSpeed configuration", "gradient_clipping"),
        "accelerate": ("Accelerator(", "accelerator.clip_grad_norm_"),
        "": ("torch.bfloat16 in a loop", "to 1.0 for a start"),
    }
    for topic, words in (("bf16", 0), ("clip", 1)):
        assert own[framework][words] in advise(topic, framework)
        assert all(own[other][words] not in advise(topic, framework) for other in FRAMEWORKS if other != framework)
    story = Story(210, 0, 1, 50, "guard", "numeric", False, True, True, False, False, framework or None)
    steps = [step for cause in told(story).details.causes for step in cause.advice]
    assert any(own[framework][0] in step for step in steps)


@pytest.mark.parametrize("cause", ["damage", "storage", "unsaved", "asked", "anew", "crash"])
def test_what_did_not_begin_at_an_update_has_no_onset(cause):
    """A damaged file, a full disk, a request."""
    story = Story(10, 5, 1, 5, "daemon", "numeric", False, True, False, True, False, None)
    report = msgspec.structs.replace(told(story), cause=cause)
    report = msgspec.structs.replace(report, details=msgspec.structs.replace(report.details, onset=None))
    assert "onset" not in report_text(msgspec.structs.replace(report, details=with_onset(report))).lower()


def test_a_wholly_sick_tensor_is_one_short_line():
    """Counts and the first index say nothing that "all" does not."""
    story = Story(10, 0, 1, 5, "guard", "weights", False, True, False, True, True, "plain")
    assert "  weight  all 9 are NaN  w\n" in report_text(told(story))
