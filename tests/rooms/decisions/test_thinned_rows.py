"""What lacks its optimizer protects no run, and nothing at risk counts from it."""

from ckptguard.decisions.run_summary import summarize
from ckptguard.values.ids import CheckpointId
from ckptguard.values.run_rows import Generation, RunPlaces


def rows_of(*thinned):
    """Good saves of steps 0 to 3 with copies of their own, a minute apart; those of some steps are thinned."""
    ids = [CheckpointId("s-#", step, 1) for step in range(4)]
    return {
        id: Generation(
            name=id.record_path,
            path=f"s-{id.step}",
            outcome="good",
            good=True,
            saved_at=60.0 * id.step,
            in_place=True,
            kept="copy" if id.step else "",
            thinned=id.step in thinned,
        )
        for id in ids
    }


def test_only_full_ones_are_safe_and_protect():
    """The newest two are weights: what is at risk counts from step 1, whose copy protects the run."""
    known_good = CheckpointId("s-#", 1, 1)
    full = summarize(RunPlaces(url="/r"), rows_of(), (), CheckpointId("s-#", 3, 1))
    assert (full.safe_at, full.protected) == (180.0, True)
    some = summarize(RunPlaces(url="/r"), rows_of(2, 3), (), known_good)
    assert (some.safe_at, some.protected, some.newest_at) == (60.0, True, 180.0)
    none = summarize(RunPlaces(url="/r"), rows_of(1, 2, 3), (), CheckpointId("s-#", 0, 1))
    assert (none.safe_at, none.protected) == (None, False)
    replicated = RunPlaces(url="/r", replicated=dict.fromkeys(rows_of(), 1))
    assert summarize(replicated, rows_of(1, 2, 3), (), CheckpointId("s-#", 0, 1)).safe_at == 0.0
