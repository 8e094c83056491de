"""Armed pickles in every container, before the real command line, under watch: nothing runs, and each is BAD."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.hostile.containers import CONTAINERS, benign_of
from faults.hostile.pickles import FIRES, armed_pickles, canary_of
from faults.hostile.watching import Case, check_cases

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"


@pytest.mark.campaign
@pytest.mark.parametrize("container", sorted(CONTAINERS))
def test_armed_pickles_are_bad_and_do_nothing(tmp_path: Path, benign: Path, container: str) -> None:
    """Every armed pickle in this container is exit 3 with its name; a benign one is exit 0; no canary is touched."""
    canaries = tmp_path / "canaries"
    canaries.mkdir()
    put = CONTAINERS[container]
    armed = armed_pickles(canaries / "canary")
    if container != "torch archive" and not FULL:
        armed = {name: armed[name] for name in armed if name in FIRES or name.startswith("route: ")}
    reasons = frozenset(("pickle-safety", "structure"))
    cases = [
        Case(name, put(tmp_path / f"{number}", data), expected=expected if container != "tar" else None, checks=reasons)
        for number, (name, (data, expected)) in enumerate(armed.items())
    ]
    control = Case("benign control", benign_of(container, tmp_path / "control"), codes=(0,))
    check_cases([*cases, control], benign=benign)
    assert list(canaries.iterdir()) == []


def test_the_pickles_are_armed(tmp_path: Path) -> None:
    """Loaded by Python's own unpickler, these do touch their canaries: the corpus is no row of blanks."""
    canary = tmp_path / "canary"
    armed = armed_pickles(canary)
    for name in FIRES:
        (tmp_path / "armed.pkl").write_bytes(armed[name].data)
        load = "import io, pickle, sys; pickle.Unpickler(io.BytesIO(open(sys.argv[1], 'rb').read())).load()"
        subprocess.run(
            [sys.executable, "-c", load, str(tmp_path / "armed.pkl")],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=250,
            check=False,
        )
    assert [name for name in FIRES if not os.path.exists(canary_of(canary, name))] == []
