"""How long a run was sick until somebody decided: any history, against a model that knows when each trouble began."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptguard.decisions.time_to_decision import Decision, new_decisions
from ckptguard.values.run_rows import Generation, IncidentRow


def save(step: int, outcome: str, at: float, generation: int = 1) -> Generation:
    """A save in the records."""
    return Generation(name=f"model-#/{step:012}.{generation}", outcome=outcome, saved_at=at)


TROUBLES = st.lists(
    st.tuples(
        st.integers(0, 3),  # good saves before it
        st.integers(0, 3),  # sick saves
        st.sampled_from(["numeric", "damage", "crash"]),
        st.sampled_from(["rollback", "other", "open"]),
        st.integers(0, 2),  # incidents beside the first one that the same rollback closes
    ),
    max_size=5,
)


@given(TROUBLES, st.data())
def test_each_decision_is_counted_once_from_the_begin_of_its_trouble(
    troubles: list[tuple[int, int, str, str, int]], data: st.DataObject
) -> None:
    """Whatever was seen before: what is seen in two looks is counted as what is seen in one."""
    saves: list[Generation] = []
    history: list[IncidentRow] = []
    expected: list[tuple[str, float]] = []
    now, step = 1000.0, 10
    for nth, (good, sick, cause, how, beside) in enumerate(troubles):
        for _ in range(good):
            now, step = now + 60.0, step + 10
            saves.append(save(step, "good", now, nth + 1))
        first, began = step + 10, now + 60.0
        for _ in range(sick):
            now, step = now + 60.0, step + 10
            saves.append(save(step, "suspect" if step % 20 else "bad", now, nth + 1))
        now += 7.0
        opened, decided = now, now + 30.0
        decides = how != "open"
        for number in range(1 + beside * (how == "rollback")):
            row = IncidentRow(
                name=f"{nth}-{number}",
                revision=1,
                cause=cause,
                step=max(step, first),
                onset=first,
                at=opened + number,
                open=not decides,
                went_back=f"{first}.{nth}" if how == "rollback" else None,
                decided_at=decided + number if decides else None,
            )
            history.append(row)
        if decides:
            begin = began if cause == "numeric" and sick else opened
            last = decided + beside * (how == "rollback")
            expected.append((how, last - begin))
        now, step = decided + 60.0, first - 10 if how == "rollback" else max(step, first)
    found = new_decisions({}, history, saves)
    assert sorted((one.decision, one.seconds) for one in found) == sorted(expected)
    seen = data.draw(st.integers(0, len(history)))
    early = new_decisions({}, history[:seen], saves)
    late = new_decisions({row.name: row for row in history[:seen]}, history, saves)
    assert len(early) + len(late) == len(expected)
    assert new_decisions({row.name: row for row in history}, history, saves) == []


def test_an_incident_that_was_open_counts_when_it_closes() -> None:
    """A release that did not record when closes none."""
    was = IncidentRow(name="a", revision=1, cause="numeric", step=5, at=100.0, open=True)
    closed = IncidentRow(name="a", revision=2, cause="numeric", step=5, at=100.0, decided_at=130.0)
    assert new_decisions({"a": was}, [closed], [save(5, "bad", 40.0)]) == [
        Decision(incident="a", decision="other", seconds=90.0)
    ]
    assert new_decisions({"a": was}, [IncidentRow(name="a", revision=2, at=100.0)], []) == []
