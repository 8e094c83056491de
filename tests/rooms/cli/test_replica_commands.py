"""replicate, and what known-good, restore and status say of replicas."""

import os
import shutil

import pytest

from ckptguard.values.exit_codes import ExitCode


@pytest.fixture
def good(three, invoke):
    """A run whose three checkpoints are good."""
    assert invoke("verify", three).exit_code == 0
    return three


def test_replicate_says_what_it_did(good, invoke, document, tmp_path):
    """Planned, sent, and there already."""
    for flags, done in ((("--dry-run",), "would send"), ((), "sent"), ((), "there")):
        code, found = document("replicate", good, "--to", tmp_path / "there", "--rate", "500MB", *flags)
        assert (code, [c["done"] for c in found["replicas"][0]["checkpoints"]]) == (0, [done] * 3)
    shown = invoke("replicate", good, "--to", tmp_path / "there")
    assert "last good 300.1, up to date" in shown.stdout


def test_what_goes_wrong_has_its_exit_code(good, invoke, flip, tmp_path):
    """No place: 2. A place that cannot be: 2. One that fails: 1, and the others are filled. Damage: 3."""
    assert invoke("replicate", good).exit_code == ExitCode.USAGE
    assert invoke("replicate", good, "--to", good / "inside").exit_code == ExitCode.USAGE
    assert invoke("replicate", good, "--to", tmp_path / "x", "--rate", "fast").exit_code == ExitCode.USAGE
    (tmp_path / "file").write_text("no folder")
    result = invoke("replicate", good, "--to", tmp_path / "file", "--to", tmp_path / "there")
    assert result.exit_code == ExitCode.FAILED
    assert str(tmp_path / "file") in result.stderr
    assert (tmp_path / "there" / "net-300.pt").is_file()
    flip(good / "net-300.pt")
    shutil.rmtree(good / "_ckptguard" / "kept", ignore_errors=True)
    assert invoke("replicate", good, "--to", tmp_path / "second").exit_code == ExitCode.BAD
    assert not (tmp_path / "second" / "net-300.pt").exists()


def test_a_lost_run_is_found_in_its_replica(good, invoke, tmp_path, monkeypatch):
    """With the replica in the settings, known-good and restore answer although the run is gone; one command begins it
    again."""
    place = tmp_path / "replicas" / "run"
    monkeypatch.setenv("CKPTGUARD_REPLICAS", str(tmp_path / "replicas" / "{run}"))
    assert invoke("replicate", good).exit_code == 0
    shutil.rmtree(good)
    assert invoke("known-good", good).stdout == f"{place}/net-300.pt\n"
    assert invoke("restore", good, "--to", tmp_path / "out").exit_code == 0
    assert os.listdir(tmp_path / "out") == ["net-300.pt"]
    assert invoke("restore", place, "--as-run", good).stdout == f"{good}/net-300.pt\n"
    assert invoke("verify", good).exit_code == 0
    assert "up to date" in invoke("status", good).stdout
    assert invoke("restore", place, "--as-run", good).exit_code == ExitCode.USAGE, "it holds its own"


@pytest.mark.parametrize("flags", [(), ("--to", "a", "--as-run", "b"), ("--as-run", "b", "--force")])
def test_restore_needs_to_know_where(good, invoke, flags):
    """--to or --as-run."""
    assert invoke("restore", good, *flags).exit_code == ExitCode.USAGE
