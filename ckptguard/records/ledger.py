"""The ledger: the append-only verdicts of a run. A verdict's name alone tells id, order and outcome."""

from __future__ import annotations

from ckptguard.decisions.known_good import Standing, standings, verdict_name
from ckptguard.errors import ObjectExistsError, RecordsError
from ckptguard.records.run import Run, create_record, list_records, read_record
from ckptguard.values.ids import series_folder, series_from_folder
from ckptguard.values.verdict import Verdict, decode_verdict, encode_verdict

FOLDER = "ledger"


def ledger_names(run: Run) -> dict[str, list[str]]:
    """Every entry's name by series: one listing of names. Empty entries do not exist."""
    by_series: dict[str, list[str]] = {}
    for key in list_records(run, FOLDER, recursive=True, with_content=True):
        folder, _, name = key.partition("/")
        if name:
            by_series.setdefault(series_from_folder(folder), []).append(name)
    return by_series


def series_names(run: Run, series: str) -> list[str]:
    """The names of one series' entries."""
    return list_records(run, f"{FOLDER}/{series_folder(series)}", with_content=True)


def read_verdict(run: Run, series: str, standing: Standing) -> Verdict | None:
    """The entry behind a standing; None if it is empty or cannot be parsed: such an entry does not exist."""
    name = verdict_name(standing.step, standing.generation, standing.number, standing.outcome)
    text = read_record(run, f"{FOLDER}/{series_folder(series)}/{name}")
    if not text:
        return None
    try:
        verdict = decode_verdict(text)
    except RecordsError:
        return None
    if (verdict.step, verdict.generation, verdict.outcome) != (standing.step, standing.generation, standing.outcome):
        return None
    return verdict


def latest_verdict(run: Run, series: str, step: int | None, generation: int, names: list[str]) -> Verdict | None:
    """The verdict that counts for one generation, passing over entries that do not exist."""
    left = list(names)
    while (standing := standings(left).get((step, generation))) is not None:
        verdict = read_verdict(run, series, standing)
        if verdict is not None:
            return verdict
        left.remove(verdict_name(step, generation, standing.number, standing.outcome))
    return None


def append_verdict(run: Run, verdict: Verdict) -> None:
    """Add a verdict with the next number.

    A racer that adds one with the same number and another outcome does no harm: the worst counts.
    """
    names = series_names(run, verdict.series)
    current = standings(names).get((verdict.step, verdict.generation))
    number = current.number + 1 if current else 1
    name = verdict_name(verdict.step, verdict.generation, number, verdict.outcome)
    try:
        create_record(run, f"{FOLDER}/{series_folder(verdict.series)}/{name}", encode_verdict(verdict))
    except ObjectExistsError:
        pass  # a racer came to the same outcome under the same number
