"""A year of one training run on paper: what its checkpoints cost in storage, by the rule that says what stays.

    python -m benchmarks.storage_year [--days 365] [--hours 2.0] [--weights-gb 14.0] [--optimizer-gb 84.0]

A dense model of 7B parameters in bf16 has 14 GB of weights. AdamW with a copy of the weights in fp32 has 84 GB of state
(12 bytes for each parameter). It saves each two hours, and all saves are good. What stays is decided by ckptguard's own
rules, once a day. The prices are the public ones of Amazon in us-east-1, in dollars for a GB and month: S3 Standard
(0.023 for the first 50 TB, 0.022 for the next 450 TB, 0.021 above), S3 Glacier Instant Retrieval (0.004), and FSx for
Lustre on SSD (0.145). Requests and traffic are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from benchmarks.measuring import options
from ckptguard.decisions.retention import Present, decide, may_be_thinned
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome

DAY = 86400.0
GB = 10**9
S3 = ((50e3, 0.023), (450e3, 0.022), (float("inf"), 0.021))  # GB of a tier, dollars for a GB and month
GLACIER, LUSTRE = 0.004, 0.145
DAY_OF_STEPS = 12_000


class Rule(NamedTuple):
    """What stays. `copies`: how many of the newest full ones have a second copy, as the known-good one always has."""

    title: str
    policy: Policy
    copies: int = 0


RULES = (
    Rule("all kept", Policy()),
    Rule("rotation: the newest 3", Policy(keep_last=3, keep_good=1)),
    Rule("all kept, old ones thinned", Policy(thin_after=3), copies=2),
    Rule("one a day kept, old ones thinned", Policy(keep_last=3, keep_every=DAY_OF_STEPS, thin_after=3), copies=2),
)


def stored(rule: Rule, days: int, saves_a_day: int, weights: float, optimizer: float) -> list[float]:
    """Return the GB that lie there at the end of each day."""
    present: list[Present] = []
    found = []
    for day in range(days):
        for number in range(saves_a_day):
            step = day * DAY_OF_STEPS + number * DAY_OF_STEPS // saves_a_day
            saved = (day + number / saves_a_day) * DAY
            id = CheckpointId("model", step, 1)
            size = round((weights + optimizer) * GB)
            present.append(Present(path=f"model-{step}", id=id, outcome=Outcome.GOOD, saved=saved, bytes=size))
        decisions = decide(present, rule.policy, now=(day + 1) * DAY)
        thinned = {one.path for one in may_be_thinned(decisions, rule.policy)}
        staying = [d.checkpoint for d in decisions if d.keep]
        present = [_thinned(one, weights) if one.path in thinned else one for one in staying]
        found.append(sum(one.bytes for one in present) / GB + rule.copies * (weights + optimizer))
    return found


def _thinned(one: Present, weights: float) -> Present:
    return msgspec.structs.replace(one, bytes=round(weights * GB), thinned=True)


def in_tiers(gigabytes: float, tiers: Sequence[tuple[float, float]]) -> float:
    """Return the dollars of a month for so much."""
    cost = 0.0
    for size, price in tiers:
        cost += min(gigabytes, size) * price
        gigabytes = max(gigabytes - size, 0.0)
    return cost


def main() -> None:
    """Print a table, as in docs/explain/costs.md."""
    given = options(__doc__, days=365, hours=2.0, weights_gb=14.0, optimizer_gb=84.0)
    saves_a_day = max(1, round(24 / given.hours))
    print("| what stays | at the end | S3 Standard | S3 Glacier IR | Lustre on SSD |")
    print("|---|---|---|---|---|")
    for rule in RULES:
        daily = stored(rule, given.days, saves_a_day, given.weights_gb, given.optimizer_gb)
        s3, flat = sum(in_tiers(day, S3) for day in daily), sum(daily)
        dollars = " | ".join(f"${cost * 12 / 365:,.0f}" for cost in (s3, flat * GLACIER, flat * LUSTRE))
        print(f"| {rule.title} | {daily[-1] / 1e3:,.1f} TB | {dollars} |")


if __name__ == "__main__":
    main()
