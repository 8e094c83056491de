"""Fleets of tiny runs, with checkpoints that are damaged on purpose."""

from __future__ import annotations

import json
import math
import struct
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckptguard.bulk.engine import Engine
from ckptguard.bulk.job import BulkDone, BulkPlan, carry_out, plan_bulk
from ckptguard.fleet.find_runs import find_runs
from ckptguard.values.settings import Settings
from support.tiny_files import WEIGHTS
from support.tiny_run import name_of, save

QUICK = Settings(settle=0.0)


def make_fleet(root: Path, runs: int, saves: int, *, sick: Iterable[tuple[int, int]] = ()) -> Path:
    """So many runs of so many saves each; those at `sick`, (run, save), hold a NaN. Both count from 0."""
    spoilt = set(sick)
    for run in range(runs):
        for number in range(saves):
            save(str(root / f"run{run}"), step_of(number), run * 1000 + number)
            if (run, number) in spoilt:
                path = root / f"run{run}" / name_of(step_of(number)) / WEIGHTS
                path.write_bytes(path.read_bytes()[:-4] + struct.pack("<f", math.nan))
    return root


def step_of(number: int) -> int:
    """The step of a save."""
    return (number + 1) * 100


def plan_of(engine: Engine, root: Path, verb: str = "verify", settings: Settings = QUICK, **how: Any) -> BulkPlan:
    """What there is to do with the runs of a fleet."""
    return plan_bulk(engine, verb, find_runs(str(root), settings).runs, **how)


def done_by(engine: Engine, plan: BulkPlan) -> BulkDone:
    """What a plan that is carried out finds."""
    deque(carry_out(engine, plan), maxlen=0)
    return plan.done


def ledger_of(root: Path) -> list[str]:
    """The names of all verdicts in a fleet, as run/series/name."""
    paths = root.glob("*/_ckptguard/ledger/*/*")
    return sorted(f"{path.relative_to(root).parts[0]}/{path.parent.name}/{path.name}" for path in paths)


def counts(document: dict[str, object]) -> dict[str, int]:
    """The outcomes in a document of `ckptguard fleet` that occur."""
    outcomes: dict[str, int] = document["outcomes"]  # type: ignore[assignment]
    return {outcome: count for outcome, count in outcomes.items() if count}


def bad_in(text: str) -> set[tuple[str, str]]:
    """The (run, checkpoint) that a JSON document of `ckptguard fleet` calls bad."""
    wrong = json.loads(text)["wrong"]
    return {(Path(one["run"]).name, one["path"]) for one in wrong if one["outcome"] == "bad"}
