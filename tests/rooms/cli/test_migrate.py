"""ckptguard migrate: only this raises the format of a run's records."""

from __future__ import annotations

import json

import pytest
from support.runs import write_torch


@pytest.fixture
def first(three, invoke, monkeypatch):
    """A verified run of format 1."""
    monkeypatch.setenv("CKPTGUARD_RECORDS_FORMAT", "1")
    assert invoke("verify", three).exit_code == 0
    monkeypatch.delenv("CKPTGUARD_RECORDS_FORMAT")
    assert format_of(three) == 1
    return three


def format_of(run):
    """What the records state."""
    return json.loads((run / "_ckptguard/format.json").read_text())["format"]


def held(run):
    """Names in the records that have the form of format 2."""
    return list((run / "_ckptguard").rglob("held.*"))


def test_records_keep_the_form_of_their_format(first, invoke, tmp_path):
    """What is new in a run of format 1 has plain names, which readers of format 1 find. After raising it has others."""
    for step in (400, 500):
        write_torch(first, step, seed=step)
        assert invoke("verify", first).exit_code == 0
        assert invoke("pin", first / f"net-{step}.pt").exit_code == 0
    assert invoke("replicate", first, "--to", tmp_path / "replica").exit_code == 0
    assert invoke("rollback", first, "--step", "400").exit_code == 0
    assert (format_of(first), held(first)) == (1, [])
    assert list((first / "_ckptguard").rglob("net-500.pt"))  # it was moved there
    assert format_of(tmp_path / "replica") == 2
    assert held(tmp_path / "replica")
    assert invoke("migrate", first).exit_code == 0
    write_torch(first, 600, seed=600)
    assert invoke("pin", first / "net-300.pt").exit_code == 0
    assert invoke("rollback", first, "--step", "300").exit_code == 0
    assert held(first)
    assert invoke("known-good", first).stdout.strip().endswith("net-300.pt")


def test_a_look_changes_nothing(first, invoke):
    """--dry-run says from what to what, and what comes with it."""
    result = invoke("migrate", first, "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.startswith("format of the records: 1 -> 2\n")
    assert "no trainer's search" in result.stdout
    assert format_of(first) == 1


def test_it_raises_once(first, invoke, document):
    """Then there is nothing to do, and the verdicts are as before."""
    before = document("list", first)
    assert document("migrate", first)[1]["raised"] is True
    assert format_of(first) == 2
    assert "nothing to do" in invoke("migrate", first).stdout
    assert document("migrate", first)[1]["raised"] is False
    assert document("list", first) == before


@pytest.mark.parametrize(("asked", "code"), [("2", 0), ("1", 0), ("3", 2), ("x", 2)])
def test_the_setting_says_to_which(first, invoke, monkeypatch, asked, code):
    """A format that this version does not know is wrong; an older one is nothing to do."""
    monkeypatch.setenv("CKPTGUARD_RECORDS_FORMAT", asked)
    assert invoke("migrate", first).exit_code == code
    assert format_of(first) == (2 if asked == "2" else 1)


def test_what_is_no_run_with_records(root, invoke):
    """One sentence, and the code of what does not exist."""
    assert invoke("migrate", root / "nothing").exit_code == 10
    assert invoke("migrate", root).exit_code == 10
    assert list(root.iterdir()) == []
