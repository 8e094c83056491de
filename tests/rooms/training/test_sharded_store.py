"""What several ranks save is sealed once, is GOOD, and is loaded bit for bit, also onto other numbers of ranks."""

from __future__ import annotations

import pytest
from sharded_training import load_and_go_on, load_into_another, save_and_go_on
from support.rank_processes import run_ranks

pytestmark = pytest.mark.torch


def answers(function, *arguments, ranks=2):
    ended = run_ranks(function, *arguments, ranks=ranks)
    for code, _, err in ended:
        assert code == 0, err
    return [answer for _, answer, _ in ended]


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.parametrize("step", [3, 0])
def test_a_sharded_save_is_good_and_comes_back(kind, step, tmp_path):
    """Saved by two ranks, verified GOOD, and loaded over another state: what follows is the same, bit for bit."""
    folder = str(tmp_path / "run")
    saved = answers(save_and_go_on, kind, folder, step)
    assert saved[0][2] == ["good", "writer", []]
    assert not [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith("tmp-")]
    loaded = answers(load_and_go_on, kind, folder, step)
    for rank in (0, 1):
        assert loaded[rank] == [*saved[rank][:2], f"rank {rank}"]


def test_names_that_do_not_fit(tmp_path):
    """They are refused, as for one process; without `strict` the rest is loaded, and they are told of."""
    folder = str(tmp_path / "run")
    answers(save_and_go_on, "ddp", folder, 3)
    [refused, _] = answers(load_into_another, folder, 3, True)
    assert refused[0] == "state"
    assert "4.bias is missing in it (2 missing, 2 unexpected)" in refused[1]
    first, second = answers(load_into_another, folder, 3, False)
    assert first[:2] == second[:2] == [["4.bias", "4.weight"], ["3.bias", "3.weight"]]
    assert first[2] == second[2]


def test_another_number_of_ranks_loads_it(tmp_path):
    """Three and four ranks load what two saved; what belonged to a rank is not guessed."""
    folder = str(tmp_path / "run")
    saved = answers(save_and_go_on, "fsdp2", folder, 3)
    for ranks in (3, 4):
        for loaded in answers(load_and_go_on, "fsdp2", folder, 3, ranks=ranks):
            assert loaded[0] == saved[0][0]
            assert loaded[2] is None
