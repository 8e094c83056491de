"""scrub and repair, as scripts see them."""

import pytest
from support.faults import flip
from support.runs import QUICK, write_sharded
from support.views import look

from ckptguard.upkeep.reconcile import PassNotes, reconcile


@pytest.fixture
def copied(root):
    """Two verified checkpoints with copies of their own."""
    for step in (100, 200):
        write_sharded(root, step, seed=step)
    reconcile(look(str(root), QUICK.changed(keep="copy")), PassNotes())
    return root


def test_exit_codes_say_what_was_found(invoke, copied):
    """0 while all is good, 3 with damage, 0 once it is repaired; nothing due is no failure."""
    shard = copied / "sharded-200" / "model-00002-of-00003.safetensors"
    assert invoke("scrub", copied).exit_code == 0
    flip(shard)
    result = invoke("scrub", copied, "--max-age", "1h")
    assert (result.exit_code, "read 0 again" in result.stdout) == (0, True)
    result = invoke("scrub", copied, "--rate", "1GB")
    assert result.exit_code == 3
    assert "model-00002-of-00003.safetensors" in result.stdout
    result = invoke("repair", copied, "--dry-run")
    assert (result.exit_code, "would repair" in result.stdout) == (0, True)
    result = invoke("repair", copied, copied / "sharded-200")
    assert (result.exit_code, "repaired sharded-200/model-00002" in result.stdout) == (0, True)
    assert invoke("scrub", copied).exit_code == 0
    result = invoke("repair", copied)
    assert (result.exit_code, "nothing is known" in result.stdout) == (0, True)


def test_what_cannot_be_repaired_is_bad(invoke, document, copied):
    """Exit code 3, and the reason, as text and in the document."""
    for shard in copied.rglob("*model-00002-of-00003.safetensors*"):
        if "200" in str(shard):
            flip(shard)
    assert invoke("scrub", copied).exit_code == 3
    result = invoke("repair", copied)
    assert result.exit_code == 3
    assert "could not repair" in result.stdout
    code, found = document("repair", copied)
    assert (code, {f["repaired"] for f in found["files"]}) == (3, {False})
    assert all(f["reason"] and f["source"] is None for f in found["files"])


def test_time_that_is_up_is_told(invoke, document, copied):
    """What is left is counted, and the next one goes on."""
    code, found = document("scrub", copied, "--max-duration", "0")
    assert (code, found["stopped"], found["left"], found["places"]) == (0, True, 4, [])
    assert found["next"]["id"] == "100.1"


def test_a_run_without_verdicts_is_not_called_good(invoke, root):
    """There is nothing to read again, which says nothing about what lies there."""
    write_sharded(root, 100, seed=1)
    result = invoke("scrub", root)
    assert (result.exit_code, "nothing here has a verdict yet" in result.stdout) == (4, True)


def test_hooks_are_told(invoke, copied, tmp_path):
    """The command of the settings gets the event."""
    said = tmp_path / "said"
    (tmp_path / "ckptguard.toml").write_text(f'on_incident = ["sh", "-c", "cat >> {said}"]\n')
    flip(copied / "sharded-200" / "model-00002-of-00003.safetensors")
    assert invoke("scrub", copied).exit_code == 3
    assert '"event":"verdict"' in said.read_text()


@pytest.mark.parametrize(
    "flags",
    [("--rate", "5"), ("--rate", "fast"), ("--max-age", "soon"), ("--max-duration", "-1")],
)
def test_flags_that_make_no_sense_are_wrong_usage(invoke, copied, flags):
    """One sentence, exit code 2."""
    result = invoke("scrub", copied, *flags)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_runs_and_checkpoints_that_are_not_there(invoke, copied, tmp_path):
    """Exit code 10."""
    assert invoke("scrub", tmp_path / "none").exit_code == 10
    assert invoke("repair", tmp_path / "none").exit_code == 10
    assert invoke("repair", copied, "999").exit_code == 10
    assert invoke("repair", copied, "../../etc").exit_code == 10


def test_repair_says_what_no_copy_can_put_right(copied, invoke):
    """Without its manifest a checkpoint cannot be held against anything: that is told, and how it is lifted."""
    manifest = next((copied / "_ckptguard" / "manifests").rglob("*.json"))
    manifest.write_bytes(manifest.read_bytes()[:-4] + b"0000")
    for flags in ((), ("--dry-run",)):
        result = invoke("repair", copied, *flags)
        assert result.exit_code == 1
        assert "is damaged" in result.stderr
        assert "ckptguard reseal" in result.stderr
        assert "nothing is known" not in result.stdout
