"""Commands for a run that are given something else."""

import pytest
from support.layouts import write_trainer

from ckptguard.values.exit_codes import ExitCode

COMMANDS = ["list", "prune", "repair", "scrub", "replicate", "gate"]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_checkpoint_is_no_run(root, tmp_path, invoke, command, recorded):
    """One sentence names the run; nothing is written into the checkpoint."""
    checkpoint = root / write_trainer(root, 10, seed=1)
    if recorded:
        assert invoke("verify", root).exit_code == 0
    before = sorted(checkpoint.rglob("*"))
    result = invoke(command, checkpoint, *(("--to", tmp_path / "there") if command == "replicate" else ()))
    assert result.exit_code == ExitCode.NOT_FOUND
    assert f"{checkpoint} is a checkpoint, not a run; its run is " in result.stderr
    assert str(root) in result.stderr.partition("its run is ")[2]
    assert sorted(checkpoint.rglob("*")) == before
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("content", ["nothing", "records", "a last model", "a last model beside checkpoints"])
def test_a_run_with_little_in_it_is_a_run(root, invoke, content):
    """No checkpoints yet, or only records; model files at its root, alone or beside checkpoints."""
    folder = root / write_trainer(root, 10, seed=1)
    if content == "records":
        assert invoke("verify", root).exit_code == 0
    if content.startswith("a last model"):
        for name in ("model.safetensors", "config.json"):
            (root / name).write_bytes((folder / name).read_bytes())
    if not content.endswith("beside checkpoints"):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    assert invoke("list", root).exit_code == 0
    assert invoke("prune", root, "--keep-last", "1").exit_code == 0
    assert invoke("repair", root).exit_code == 0


def test_pin_says_what_begins_records(root, invoke):
    """A checkpoint of a run that was never verified."""
    result = invoke("pin", root / write_trainer(root, 10, seed=1))
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "verify" in result.stderr
