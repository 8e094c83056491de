"""The ledger: the append-only verdicts of a run. A verdict's name contains its id, order and outcome."""

from __future__ import annotations

from collections.abc import Collection

from ckptguard.decisions.known_good import CurrentVerdict, current_verdicts, verdict_name
from ckptguard.records.run import Run, has_content, list_records, record_names, write_once
from ckptguard.values.ids import series_folder
from ckptguard.values.record_text import encode_checked
from ckptguard.values.verdict import Verdict

FOLDER = "ledger"


def series_names(run: Run, series: str, *, known: Collection[str] = ()) -> list[str]:
    """Return the names of one series' entries. Entries `known` to have content are not checked again."""
    folder = f"{FOLDER}/{series_folder(series)}"
    if not known:
        return list_records(run, folder, with_content=True)
    names = record_names(run, folder)
    return [name for name in names if name in known or has_content(run, f"{folder}/{name}")]


def append_verdict(run: Run, verdict: Verdict, *, after: int | None = None) -> str:
    """Add a verdict with the next number, or the one `after` a number. Returns the entry's name. Of concurrent ones
    with one number the worst counts."""
    folder = f"{FOLDER}/{series_folder(verdict.series)}"
    own = f"{verdict.id.record_name}."
    names = [name for name in record_names(run, folder) if name.startswith(own)]
    written = [name for name in names if has_content(run, f"{folder}/{name}")]
    if after is None:
        current = current_verdicts(verdict.series, written).get(verdict.id)
        after = current.number if current else 0
    empty, number = set(names) - set(written), after + 1
    while (name := verdict_name(CurrentVerdict(id=verdict.id, number=number, outcome=verdict.outcome))) in empty:
        number += 1  # nothing can be written there
    write_once(run, f"{folder}/{name}", encode_checked(verdict))  # or a concurrent process has the same outcome
    return name
