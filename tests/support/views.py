"""Views of runs, as tests need them: fresh ones, with quick settings."""

from __future__ import annotations

from ckptguard.decisions.known_good import CurrentVerdict, verdict_name
from ckptguard.records.run import Run, open_run
from ckptguard.runs.run_reader import RunMemory
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

_QUICK = Settings(settle=0.0, scan_interval=1.0)  # files written a moment ago count as quiet


def look(run: Run | str, settings: Settings = _QUICK, memory: RunMemory | None = None) -> RunView:
    """What lies there and what the records say, as of now; of a path, or of a run and with what it was opened with."""
    opened = run if isinstance(run, Run) else open_run(run, settings)
    return RunView(opened, settings.changed(storage=opened.options), memory)


def entry_name(step: int | None, generation: int, number: int, outcome: Outcome) -> str:
    """The name of a ledger entry."""
    return verdict_name(CurrentVerdict(id=CheckpointId("", step, generation), number=number, outcome=outcome))
