"""Names are read as the trainers that write them mean it: each number is the step, a part, or the name itself."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ckptguard.decisions.names import Listed, NameReading, read_names

CORPUS: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parents[2] / "support/names_corpus.toml").read_text(encoding="utf-8")
)["trainer"]
KINDS = {"/": "folder", "@": "link"}


def listed(name: str) -> Listed:
    """A name as ``ls -F`` shows it."""
    kind = KINDS.get(name[-1], "file")
    return Listed(name.rstrip("/@"), kind)


def said(reading: NameReading) -> tuple[object, ...]:
    """What a reading says, as the corpus states it."""
    return reading.series, reading.step, reading.part, reading.parts, reading.role, reading.word, reading.pointer


def test_the_corpus_is_large() -> None:
    """At least 300 names of at least 60 trainers."""
    names = {(one["repository"], row[0]) for one in CORPUS for series in one["series"] for row in series["names"]}
    assert len(names) >= 300
    assert len({one["repository"] for one in CORPUS}) >= 60


@pytest.mark.parametrize("trainer", CORPUS, ids=lambda one: f"{one['repository']}:{one['file']}")
def test_names_mean_what_their_trainer_means(trainer: dict[str, Any]) -> None:
    """The series, step, part, role and word of each name in a listing of several saves."""
    truth = {}
    for series in trainer["series"]:
        for name, step, *part in series["names"]:
            number, many = [*part, None, None][:2]
            about = series["series"], None if step == "-" else step, number, many
            truth[name.rstrip("/@")] = (*about, series["role"], series.get("counts"), series.get("pointer", False))
    names = [listed(row[0]) for series in trainer["series"] for row in series["names"]]
    readings = {name: said(reading) for name, reading in read_names(names).items()}
    assert readings == truth
