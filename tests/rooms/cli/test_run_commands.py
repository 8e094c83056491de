"""known-good, list, show, status, restore, rollback, clear, reseal and accept, through the command line."""

import os

import msgspec
import pytest
import torch
from support.runs import state_dict, write_torch

from ckptguard.records.ledger import append_verdict
from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Finding, Outcome, Severity


def test_known_good_prints_the_path_alone(invoke, verified):
    """stdout is one line: a path that can be loaded as it is."""
    result = invoke("known-good", verified)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{verified / 'net-300.pt'}\n", "")


def test_known_good_document(document, verified):
    """The document has the contract's keys and where the checkpoint lies, and --before-step is exclusive."""
    code, found = document("known-good", verified, "--before-step", 300)
    assert code == 0
    keys = ["path", "series", "step", "id", "kept", "place", "verified_at", "reason", "thinned", "save"]
    assert list(found)[2:] == keys
    assert found["thinned"] == []
    assert (found["step"], found["id"], found["path"]) == (200, "200.1", str(verified / "net-200.pt"))


def test_no_known_good_is_a_code_of_its_own(invoke, three):
    """Nothing verified: 13, nothing on stdout."""
    result = invoke("known-good", three)
    assert (result.exit_code, result.stdout) == (13, "")


@pytest.mark.parametrize("name", ["known-good", "list", "status"])
def test_a_run_that_is_not_there(invoke, name):
    """Commands on an absent run end with 10."""
    assert invoke(name, "absent").exit_code == 10


def test_list_tells_where_each_checkpoint_stands(document, invoke, verified, flip):
    """Verdicts, places and reasons come from the records."""
    flip(verified / "net-100.pt")
    invoke("verify", verified)
    write_torch(verified, 400, seed=4)
    code, found = document("list", verified)
    assert code == 0
    stood = {c["path"]: (c["outcome"], c["id"], c["in_place"]) for c in found["checkpoints"]}
    assert stood["net-100.pt"] == ("bad", "100.1", True)
    assert stood["net-200.pt"] == ("good", "200.1", True)
    assert stood["net-400.pt"] == ("pending", None, True)
    lines = invoke("list", verified).stdout.splitlines()
    assert lines[0].split()[:3] == ["PATH", "OUTCOME", "WHERE"]
    assert len(lines) == 5


def test_list_of_an_empty_run(invoke, root):
    """No checkpoints yet: no data, one sentence, exit 0."""
    result = invoke("list", root)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr


def test_show_describes_files_and_verdicts(document, invoke, verified):
    """A checkpoint's manifest and verdict, with MD5 digests that md5sum would print."""
    code, found = document("show", verified / "net-200.pt")
    assert (code, found["id"], found["sealed"]) == (0, "200.1", True)
    [file] = found["files"]
    assert len(file["md5"]) == 32
    assert {t["name"] for t in file["tensors"]} == set(state_dict(1))
    assert found["verdict"]["outcome"] == "good"
    assert file["md5"] in invoke("show", verified / "net-200.pt").stdout


def test_a_lone_file_that_is_on_no_record_is_explained(invoke, root):
    """Read as a file of its own it is good, and nothing is recorded: known-good says what records it."""
    write_torch(root, 1, seed=1)
    (root / "net-1.pt").rename(root / "model.pt")
    assert invoke("verify", root / "model.pt").exit_code == 0
    found = invoke("known-good", root)
    assert (found.exit_code, found.stdout) == (13, "")
    assert f"ckptguard-daemon --once {root}" in found.stderr


def test_known_good_of_a_recorded_run_points_at_verify(invoke, verified, flip):
    """What is recorded and bad is shown by verify."""
    for step in (100, 200, 300):
        flip(verified / f"net-{step}.pt")
    invoke("verify", verified)
    for copy in (verified / "_ckptguard" / "kept").rglob("*.held"):
        copy.unlink()
    found = invoke("known-good", verified)
    assert found.exit_code == 13
    assert f"ckptguard verify {verified}" in found.stderr


def test_show_of_a_run_is_refused(invoke, verified):
    """A run is listed, not shown."""
    assert invoke("show", verified).exit_code == 10


def test_status_answers_the_question(document, invoke, three):
    """Unprotected without a known-good checkpoint (13); afterwards it is named."""
    code, found = document("status", three)
    assert (code, found["protected"], found["known_good"]) == (13, False, None)
    invoke("verify", three)
    code, found = document("status", three)
    assert (code, found["known_good"]["id"]) == (0, "300.1")
    assert "net-300.pt is known good" in invoke("status", three).stdout


def test_restore_makes_the_destination(document, verified, tmp_path):
    """An absent DEST is made; the result has its own name and bytes."""
    code, found = document("restore", verified, "--to", tmp_path / "out")
    assert (code, found["path"], found["id"]) == (0, str(tmp_path / "out" / "net-300.pt"), "300.1")
    assert (tmp_path / "out" / "net-300.pt").read_bytes() == (verified / "net-300.pt").read_bytes()


def test_restore_prints_the_path(invoke, verified, tmp_path):
    """An empty DEST is filled, and stdout is the path alone."""
    (tmp_path / "out").mkdir()
    result = invoke("restore", verified, "--step", 100, "--to", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'out' / 'net-100.pt'}\n")
    assert f"restoring net-100.pt of {verified}" in result.stderr
    assert result.stderr.endswith(f" as {tmp_path / 'out' / 'net-100.pt'}\n")


def test_restore_refuses_a_destination_in_use(invoke, verified, tmp_path):
    """A DEST with anything in it is left alone: wrong usage."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    assert invoke("restore", verified, "--to", tmp_path / "out").exit_code == 2
    assert os.listdir(tmp_path / "out") == ["mine"]


def test_a_bad_checkpoint_needs_force(invoke, verified, tmp_path, flip):
    """Damage is refused with 3 and leaves nothing; --force hands it out."""
    flip(verified / "net-200.pt")
    invoke("verify", verified)
    refused = invoke("restore", verified, "--step", 200, "--to", tmp_path / "out")
    assert (refused.exit_code, refused.stdout) == (3, "")
    assert not (tmp_path / "out").exists()
    assert invoke("restore", verified, "--step", 200, "--to", tmp_path / "out", "--force").exit_code == 0
    assert (tmp_path / "out" / "net-200.pt").read_bytes() == (verified / "net-200.pt").read_bytes()


def poison(root):
    """Save NaN as step 400."""
    state = state_dict(4)
    state["embed.weight"][0, 0] = float("nan")
    torch.save(state, root / "net-400.pt")


def test_rollback_makes_the_good_one_the_newest(document, invoke, verified):
    """The poisoned save is moved aside; a dry run says so first and moves nothing."""
    poison(verified)
    assert invoke("verify", verified).exit_code == 3
    code, found = document("rollback", verified, "--dry-run")
    assert (code, found["dry_run"], found["quarantined"]) == (0, True, ["net-400.pt"])
    assert (verified / "net-400.pt").exists()
    code, found = document("rollback", verified)
    assert (code, found["known_good"]["id"], found["dry_run"]) == (0, "300.1", False)
    assert sorted(p.name for p in verified.glob("*.pt")) == ["net-100.pt", "net-200.pt", "net-300.pt"]
    listed = {(c["path"], c["quarantined"]) for c in document("list", verified)[1]["checkpoints"]}
    assert ("net-400.pt", True) in listed


def test_a_dry_run_of_a_rollback_tells_what_it_cannot_know(document, invoke, verified):
    """A newer checkpoint without a verdict would be verified first, and may be the one to go back to."""
    write_torch(verified, 400, seed=4)
    assert document("rollback", verified, "--dry-run")[1]["unverified"] == ["net-400.pt"]
    assert invoke("rollback", verified, "--dry-run").stdout.startswith("would first verify net-400.pt")


def test_rollback_refuses_while_training_writes(invoke, verified, monkeypatch):
    """Files written a moment ago: 11, and nothing moves."""
    monkeypatch.setenv("CKPTGUARD_SETTLE", "3600")
    result = invoke("rollback", verified)
    assert (result.exit_code, result.stdout) == (11, "")
    assert "hint: " in result.stderr


def test_reseal_takes_the_bytes_as_a_new_save(document, invoke, verified):
    """What changed under its old time looks like damage; on the user's word it is a new generation."""
    state = state_dict(200)
    state["embed.weight"][0, 0] += 1
    before = (verified / "net-200.pt").stat()
    torch.save(state, verified / "net-200.pt")
    os.utime(verified / "net-200.pt", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert invoke("verify", verified).exit_code == 3
    code, found = document("reseal", verified / "net-200.pt")
    assert (code, found["checkpoint"]["id"], found["checkpoint"]["outcome"]) == (0, "200.2", "good")
    assert invoke("verify", verified).exit_code == 0


def test_accept_takes_a_new_schema(document, invoke, verified):
    """A deliberate change of shapes is a question until it is accepted."""
    torch.save(state_dict(4, layers=5), verified / "net-400.pt")
    assert invoke("verify", verified, "--step", 400).exit_code == 4
    code, found = document("accept", verified, "net-400.pt")
    assert (code, found["checkpoint"]["outcome"]) == (0, "good")
    assert invoke("known-good", verified).stdout.strip().endswith("net-400.pt")


def test_clear_lifts_a_suspicion_with_a_reason(document, invoke, verified):
    """A suspect generation is good again afterwards, and the reason is in the verdict."""
    suspected = append_suspicion(verified, 300)
    assert invoke("known-good", verified).stdout.strip().endswith("net-200.pt")
    code, found = document("clear", verified, suspected, "--reason", "the data was fine")
    assert (code, found["outcome"], found["id"]) == (0, "good", "300.1")
    assert "the data was fine" in found["findings"][-1]["message"]
    assert invoke("known-good", verified).stdout.strip().endswith("net-300.pt")


def append_suspicion(root, step):
    """Record that training was sick when this step was saved; returns the checkpoint's id."""
    run = open_run(str(root))
    verdict = load_history(run).verdict(CheckpointId("net-#.pt", step, 1))
    sick = Finding(check="incident", severity=Severity.SICKNESS, message="saved while the loss was nan")
    append_verdict(run, msgspec.structs.replace(verdict, outcome=Outcome.SUSPECT, findings=(sick,)))
    return f"{step}.1"


def test_only_suspicion_can_be_cleared(invoke, verified):
    """Damage cannot be talked away, good needs no clearing, and a reason must be given."""
    poison(verified)
    invoke("verify", verified)
    assert invoke("clear", verified, "400", "--reason", "nicer").exit_code == 3
    assert invoke("clear", verified, "300", "--reason", "nicer").exit_code == 2
    assert invoke("clear", verified, "9999", "--reason", "nobody").exit_code == 10
    assert invoke("clear", verified, "300").exit_code == 2


def test_an_empty_run_is_not_told_to_start_a_daemon(invoke, root):
    """What helps is another path, or a first save."""
    done = invoke("known-good", root)
    assert (done.exit_code, done.stdout) == (13, "")
    assert "hint: there is no checkpoint in it yet; check the path, or wait for the first save" in done.stderr
