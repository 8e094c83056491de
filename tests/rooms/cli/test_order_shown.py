"""What `list` and `show` say of the order of a series."""

from __future__ import annotations

import pytest
import torch

from ckptguard.values.settings import Settings
from ckptguard.verification.target import verify_target


def _save(path, number, **beside):
    torch.manual_seed(number)
    torch.save({"model": torch.nn.Linear(4, 3).state_dict(), **beside}, path)


def _verify(run):
    verify_target(str(run), Settings(settle=0.0))


def test_list_and_show_say_what_orders_a_series(tmp_path, invoke):
    """The counter inside, where it comes from, and the order in words; a counter alone for what names say no number."""
    _save(tmp_path / "ckpt.pt", 1, iter_num=3500)
    _verify(tmp_path)
    listed, shown = invoke("list", tmp_path).stdout, invoke("show", tmp_path / "ckpt.pt").stdout
    assert "iter_num 3500" in listed
    assert "ckpt.pt is ordered by the order in which its contents were saved" in listed
    assert "iter_num 3500 (ckpt.pt: iter_num)" in shown
    _save(tmp_path / "recovery-0-950.pt", 2)
    _save(tmp_path / "recovery-1-50.pt", 3)
    _verify(tmp_path)
    assert "recovery-#-#.pt is ordered by the numbers in its name" in invoke("list", tmp_path).stdout


def test_generations_are_listed_as_numbers(tmp_path, invoke, document):
    """The tenth save under one name comes after the second one, in the table and in JSON."""
    for number in range(1, 13):
        _save(tmp_path / "ckpt.pt", number, iter_num=number)
        _verify(tmp_path)
    ids = [f"-.{number}" for number in range(1, 13)]
    assert [one["id"] for one in document("list", tmp_path)[1]["checkpoints"]] == ids
    assert [line.split()[1] for line in invoke("list", tmp_path).stdout.splitlines()[1:13]] == ids


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["verify"], ["checkpoints"]),
        (["list"], ["checkpoints"]),
        (["status"], ["pending"]),
        (["prune", "--keep-last", "9", "--dry-run"], ["kept"]),
        (["prune", "--keep-last", "1", "--dry-run"], ["removed"]),
        (["scrub"], ["places"]),
    ],
)
def test_every_list_has_checkpoints_in_their_order(tmp_path, document, words, where):
    """Step 9 comes before step 10, whatever the command."""
    for number in (10, 9, 100, 11, 2):
        _save(tmp_path / f"step-{number}.pt", number)
    if words[0] not in ("verify", "status"):
        _verify(tmp_path)
    found = document(words[0], tmp_path, *words[1:])[1]
    for key in where:
        paths = [one if isinstance(one, str) else one["path"] for one in found[key]]
        steps = [int(path.removeprefix("step-").removesuffix(".pt")) for path in paths]
        assert len(steps) > 1
        assert steps == sorted(steps)
