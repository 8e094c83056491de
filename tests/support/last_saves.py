"""What the records of a run say of its newest save, without reading it."""

from ckptguard.layouts import Checkpoint
from ckptguard.records.run import open_run
from ckptguard.values.ids import numbers_of
from ckptguard.values.verdict import Outcome
from support.views import look


def recorded_outcome_of_last(run: object) -> Outcome | None:
    """Of the save with the highest number in place; None while it has no verdict."""
    view = look(open_run(str(run)))

    def order(checkpoint: Checkpoint) -> tuple[int, ...]:
        return numbers_of(checkpoint.step)

    id = view.current(max(view.checkpoints, key=order))
    verdict = view.history.verdict(id) if id is not None else None
    return verdict.outcome if verdict is not None else None
