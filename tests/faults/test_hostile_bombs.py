"""Bombs before the real command line: each answer within 10 s of CPU and 1 GiB, exit 3 or 4, with its JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.hostile.bombs import BOMBS, HARMLESS, SPARSE, TOO_LARGE, UNDECIDED, benign_bomb, write_sparse
from faults.hostile.watching import Case, check_cases


def test_bombs_do_not_go_off(tmp_path: Path, benign: Path) -> None:
    """Every bomb is bad or undecided, in bounded time and memory; a large but honest file is good."""
    cases = []
    for number, (kind, (name, make)) in enumerate(BOMBS.items()):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        path.write_bytes(make())
        codes = (0,) if kind in HARMLESS else (1,) if kind in UNDECIDED else (3, 4)
        cases.append(Case(kind, path, codes=codes))
    honest = tmp_path / "honest.pt"
    honest.write_bytes(benign_bomb())
    check_cases([*cases, Case("honest", honest, codes=(0,))], benign=benign)


@pytest.mark.parametrize("kind", sorted(SPARSE))
def test_files_of_holes_do_not_fill_the_memory(tmp_path: Path, benign: Path, kind: str) -> None:
    """What a file's size or its first bytes claim is never all taken into memory."""
    name, start, size = SPARSE[kind]
    path = tmp_path / "sparse" / name
    path.parent.mkdir()
    codes = (1,) if kind in TOO_LARGE else (3, 4)
    check_cases([Case(kind, write_sparse(path, start, size), codes=codes)], benign=benign)
