"""Drift: weights that jumped or collapsed since the last good checkpoint."""

from __future__ import annotations

from support.evidence import T, evidence, found_by, manifest

from ckptguard.checks import Evidence
from ckptguard.values.verdict import Facts, Severity

REST = [T(f"w{i}") for i in range(5)]


def drift(before: T, now: T, **more: object) -> list[str]:
    """The messages about one tensor beside five that stay."""
    given: Evidence = evidence({"m.pt": [*REST, now]}, reference=manifest({"m.pt": [*REST, before]}), **more)  # type: ignore[arg-type]
    found = found_by("drift", given)
    assert all(f.severity is Severity.NOTICE for f in found)
    return [f.message for f in found]


def test_jumps_and_collapses_are_told() -> None:
    """Tenfold, of the rms or the largest magnitude alone."""
    usual = T("x")
    assert "rms 0.5 became 50" in drift(usual, usual._replace(rms=50.0, largest=90.0))[0]
    assert "rms 0.5 became 0.001" in drift(usual, usual._replace(rms=0.001))[0]
    assert "largest magnitude 1 became 40" in drift(usual, usual._replace(largest=40.0))[0]
    assert "largest magnitude 1 became 40" in drift(usual._replace(rms=None), usual._replace(largest=40.0))[0]
    assert drift(usual, usual._replace(rms=4.0, largest=8.0)) == []
    assert len(drift(usual, usual._replace(rms=0.0, largest=0.0))) == 1


def test_what_starts_small_may_grow() -> None:
    """A LoRA's B, a fresh bias: from nothing to less than weights usually are."""
    b = T("lora_B", largest=0.0, rms=0.0)
    assert drift(b, b._replace(rms=0.2, largest=0.4)) == []
    begun = b._replace(rms=1e-5, largest=1e-4)
    assert drift(begun, begun._replace(rms=0.02, largest=0.1)) == []
    assert drift(begun, begun._replace(rms=1e-7, largest=1e-6)) == []
    assert len(drift(begun, begun._replace(rms=7.0, largest=9.0))) == 1


def test_tiny_tensors_statistics_and_other_roles_may_do_as_they_like() -> None:
    """Running statistics start at 0 and 1; a vector of 8 is no distribution; moments follow gradients."""
    for usual in (T("x", shape=(8,)), T("bn.running_var"), T("running_mean"), T("o", role="optimizer")):
        assert drift(usual, usual._replace(rms=500.0, largest=500.0)) == []


def test_one_notice_names_the_worst_of_many() -> None:
    """The count, the first three, the worst as the finding's tensor."""
    before = [T(f"x{i}") for i in range(9)]
    now = [t._replace(rms=0.5 * 20.0 ** (i + 1)) for i, t in enumerate(before[:5])] + before[5:]
    [finding] = found_by("drift", evidence({"m.pt": now}, reference=manifest({"m.pt": before})))
    assert (finding.tensor, finding.count) == ("x4", 5)
    assert "x4: rms" in finding.message
    assert "x2: rms" in finding.message
    assert "x1" not in finding.message
    assert "2 more" in finding.message


def test_pieces_of_several_ranks_count_together() -> None:
    """Which rank holds the large piece does not matter."""
    small, large = T("w", rms=0.1, largest=0.2), T("w", rms=10.0, largest=20.0)
    before = manifest({"rank_0.pt": [small, *REST], "rank_1.pt": [large]})
    assert found_by("drift", evidence({"rank_0.pt": [large, *REST], "rank_1.pt": [small]}, reference=before)) == []


def test_a_later_reference_says_nothing() -> None:
    """What grew since would look as if it collapsed."""
    before = manifest({"m.pt": [*REST, T("x", rms=50.0, largest=90.0)]}, step=9)
    assert found_by("drift", evidence({"m.pt": [*REST, T("x")]}, reference=before)) == []


def test_a_reference_without_magnitudes() -> None:
    """Our writer seals without looking; then the largest of all is known from the verdict."""
    bare = manifest({"m.pt": [t._replace(digest=None) for t in REST]})
    given = evidence({"m.pt": REST}, reference=bare, reference_facts=Facts(largest_magnitude=0.01))
    assert [f.message for f in found_by("drift", given)] == [
        "the largest magnitude grew from 0.01 to 1 since the reference"
    ]
