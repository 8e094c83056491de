"""Whatever a record of an incident holds, it is passed over or becomes a report: nothing raises, nothing breaks out."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.html_page import Page

from ckptguard.reporting.causes import likely_causes
from ckptguard.reporting.report_html import report_html
from ckptguard.reporting.report_text import report_text
from ckptguard.values.incident import (
    ChangedTensor,
    CheckpointFacts,
    Details,
    IncidentReport,
    LikelyCause,
    Magnitude,
    Resumed,
    Sample,
    SickTensor,
    Training,
)

TEXT = st.text(max_size=12)
STEP = st.none() | st.integers(-(2**70), 2**70)
NUMBER = st.none() | st.floats() | st.sampled_from(["nan", "inf", "-inf", "<b>", ""])
TEXTS = st.lists(TEXT, max_size=3).map(tuple)
SAMPLES = st.lists(st.builds(Sample, st.integers(-(2**70), 2**70), NUMBER, NUMBER, NUMBER, NUMBER), max_size=30).map(
    lambda found: tuple(sorted(found, key=lambda s: s.step))
)
FACTS = st.builds(
    CheckpointFacts,
    path=TEXT,
    step=STEP,
    id=st.none() | TEXT,
    outcome=TEXT,
    largest=st.lists(st.builds(Magnitude, TEXT, st.floats(), st.none() | TEXT), max_size=4).map(tuple),
    holds=TEXTS,
    world_size=STEP,
    errors=st.lists(st.tuples(st.sampled_from(["digests", "schema", "x"]), TEXT), max_size=3).map(tuple),
)
TRAINING = st.builds(
    Training,
    dtypes=st.dictionaries(st.sampled_from(["float16", "float32", "<i>"]), st.integers(-5, 2**70), max_size=3),
    autocast=st.none() | st.sampled_from(["off", "float16"]),
    loss_scaler=st.none() | TEXT,
    optimizer=st.none() | st.sampled_from(["AdamW", "SGD"]),
    eps=st.none() | st.floats(),
    lr=st.none() | st.floats(),
    world_size=STEP,
    versions=st.dictionaries(TEXT, TEXT, max_size=2),
)
DETAILS = st.builds(
    Details,
    onset=STEP,
    onset_through=STEP,
    changes=st.lists(
        st.builds(
            ChangedTensor,
            name=TEXT,
            role=TEXT,
            change=TEXT,
            elements=STEP,
            became_nonfinite=st.integers(-(2**70), 2**70),
            first_nonfinite=st.none() | st.lists(st.integers(), max_size=20).map(tuple),
            relative_l2=NUMBER,
            largest_change=NUMBER,
            largest=st.none() | st.floats(),
            note=st.none() | TEXT,
        ),
        max_size=3,
    ).map(tuple),
    changes_omitted=st.integers(-5, 2**70),
    changes_note=st.none() | TEXT,
    samples=SAMPLES,
    training=st.none() | TRAINING,
    resumed=st.none() | st.builds(Resumed, step=st.integers(), anew=TEXTS, missing=TEXTS, world_size=STEP),
    tensors=st.lists(
        st.builds(SickTensor, name=TEXT, kind=TEXT, nan=STEP, inf=STEP, elements=STEP, what=st.none() | TEXT),
        max_size=4,
    ).map(tuple),
    tensors_omitted=st.integers(),
    tensors_from=st.none() | TEXT,
    last_good=st.none() | FACTS,
    first_bad=st.none() | FACTS,
    causes=st.just(())
    | st.lists(
        st.builds(LikelyCause, name=TEXT, title=TEXT, confidence=TEXT, weight=st.floats(), because=TEXTS, advice=TEXTS),
        max_size=2,
    ).map(tuple),
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.floats() | TEXT | st.integers(), lambda of: st.lists(of, max_size=2)
)
REPORTS = st.builds(
    IncidentReport,
    run=TEXT,
    id=TEXT,
    opened_at=TEXT,
    step=STEP,
    cause=st.sampled_from(["grad_norm", "loss_scale", "storage", "asked", "damage", "spike", "<p>"]),
    reason=TEXT,
    state=TEXT,
    source=TEXT,
    actions=TEXTS,
    known_good=st.none() | TEXT,
    evidence=st.dictionaries(st.sampled_from(["loss", "grad_norm", "tensor", "<u>"]), VALUE, max_size=4),
    details=DETAILS,
)


@settings(max_examples=150, deadline=None)
@given(REPORTS)
def test_any_report_is_told(report):
    """Causes, page and text come out of any record; the page is balanced, and curves hold no word for a number."""
    concluded = msgspec.structs.replace(report.details, causes=report.details.causes or likely_causes(report))
    whole = msgspec.structs.replace(report, details=concluded)
    text = report_html(whole)
    Page(text)
    assert "<script" not in text
    assert 'x1="nan' not in text
    assert 'points="nan' not in text
    assert "\x1b" not in report_text(whole)
