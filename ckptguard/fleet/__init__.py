"""Find the runs of a fleet, and the settings of each.

    fleet = find_runs("/data/runs", settings, environ=os.environ)

`Discovery(read_fleet(...)).find()` does the same again and again.
"""

from __future__ import annotations

from ckptguard.fleet.find_runs import (
    Discovery,
    Fleet,
    FleetRules,
    FleetRun,
    PlaceState,
    find_runs,
    folders_of,
    read_fleet,
)

__all__ = ["Discovery", "Fleet", "FleetRules", "FleetRun", "PlaceState", "find_runs", "folders_of", "read_fleet"]
