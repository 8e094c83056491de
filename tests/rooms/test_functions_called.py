"""How many functions the data of a command crosses: what a reader of the code has to follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.functions_called import figures, functions_called

MOST = {"known-good": 80, "verify": 347, "look": 63}


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The functions by what was done."""
    return figures(tmp_path_factory.mktemp("functions") / "run")


@pytest.mark.parametrize("what", MOST)
def test_the_way_of_the_data_is_short(called: dict[str, list[str]], what: str) -> None:
    """No command crosses more functions than it did when this was written."""
    assert 0 < len(called[what]) <= MOST[what], "\n".join(called[what])


def test_only_own_functions_count(tmp_path: Path) -> None:
    """Neither those of others, nor what a function builds inside itself."""
    from ckptguard.values.ids import is_safe_path

    assert functions_called(lambda: sorted([1], key=lambda one: -one)) == []
    assert functions_called(lambda: is_safe_path("a/b")) == ["ckptguard/values/ids.py is_safe_path"]
