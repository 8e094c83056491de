"""verify: what scripts and people see of a verification."""

import fractions
import hashlib
import json
import os
import resource
import shutil

import pytest
import torch
from support.runs import save_file, state_dict, write_safetensors, write_torch

import ckptguard.runs.history
from ckptguard.errors import DeniedError, StorageError
from ckptguard.verification import checkpoint as checkpoint_module

CONTRACT = ["path", "series", "layout", "step", "id", "outcome", "digest_origin", "bytes", "seconds", "findings"]
FINDING = ["check", "severity", "file", "tensor", "count", "expected", "found", "message"]


def test_a_good_run_ends_with_zero(document, three):
    """All good: exit 0, and every checkpoint is in the document with exactly the contract's keys."""
    code, found = document("verify", three)
    assert code == 0
    assert list(found) == [
        "schema",
        "command",
        "target",
        "kind",
        "outcome",
        "checkpoints",
        "not_understood",
        "what_now",
    ]
    assert (found["kind"], found["outcome"], found["target"]) == ("run", "good", str(three))
    assert [list(c) for c in found["checkpoints"]] == [CONTRACT] * 3
    assert [(c["path"], c["step"], c["id"]) for c in found["checkpoints"]] == [
        (f"net-{step}.pt", step, f"{step}.1") for step in (100, 200, 300)
    ]
    assert {c["digest_origin"] for c in found["checkpoints"]} == {"observer"}


def test_a_flipped_bit_after_verification_is_bad(document, invoke, verified, flip):
    """Damage that torch.load does not notice ends with 3 and names the file and the tensor."""
    flip(verified / "net-200.pt")
    torch.load(verified / "net-200.pt", weights_only=True)
    code, found = document("verify", verified)
    assert code == 3
    bad = [c for c in found["checkpoints"] if c["outcome"] == "bad"]
    assert [c["path"] for c in bad] == ["net-200.pt"]
    errors = [f for f in bad[0]["findings"] if f["severity"] == "error"]
    assert {f["file"] for f in errors} == {"net-200.pt"}
    assert any(f["tensor"] for f in errors)
    assert all(list(f) == FINDING for f in bad[0]["findings"])
    text = invoke("verify", verified)
    assert text.exit_code == 3
    assert "net-200.pt" in text.stdout
    assert text.stderr == ""


def test_a_stray_file_is_only_read(document, tmp_path, root):
    """A file outside a run is judged, and nothing is written beside it."""
    path = tmp_path / "alone" / "model.safetensors"
    path.parent.mkdir()
    save_file(state_dict(1), path)
    code, found = document("verify", path)
    assert (code, found["kind"], found["outcome"]) == (0, "file", "good")
    assert found["checkpoints"][0]["id"] is None
    assert os.listdir(path.parent) == ["model.safetensors"]


def test_a_stray_checkpoint_folder_is_only_read(document, tmp_path, root):
    """A folder that is one checkpoint is judged as one."""
    write_safetensors(tmp_path / "alone", 7, seed=7)
    code, found = document("verify", tmp_path / "alone" / "model-7")
    assert (code, found["kind"]) == (0, "checkpoint")
    assert not (tmp_path / "alone" / "_ckptguard").exists()


def test_step_and_newest_choose(document, three):
    """--step takes one checkpoint, --newest the last ones, and a step that is not there ends with 10."""
    assert [c["step"] for c in document("verify", three, "--step", 200)[1]["checkpoints"]] == [200]
    assert [c["step"] for c in document("verify", three, "--newest", 2)[1]["checkpoints"]] == [200, 300]
    assert document("verify", three, "--step", 7)[0] == 10


@pytest.mark.parametrize("target", ["absent", "absent/deeper", "memory://nothing-here"])
def test_what_is_not_there_is_not_found(invoke, target):
    """No such run or checkpoint: exit 10, one sentence, nothing on stdout."""
    result = invoke("verify", target)
    assert (result.exit_code, result.stdout) == (10, "")
    assert result.stderr.startswith("error: ")


def test_no_record_writes_nothing(invoke, three):
    """--no-record leaves the run without records."""
    assert invoke("verify", three, "--no-record").exit_code == 0
    assert not (three / "_ckptguard").exists()


def test_a_reference_with_other_shapes_is_bad(document, three, tmp_path):
    """--reference gives the tensors that must be there."""
    other = tmp_path / "other.pt"
    torch.save(state_dict(1, width=24), other)
    assert document("verify", three / "net-100.pt", "--reference", three / "net-200.pt")[0] == 0
    assert document("verify", three / "net-100.pt", "--reference", other)[0] == 3


def test_a_file_that_is_still_written_is_pending(document, three, monkeypatch):
    """--wait 0 does not wait: a file written a moment ago has no verdict yet, which is 4, never 0."""
    monkeypatch.setenv("CKPTGUARD_SETTLE", "60")
    os.utime(three / "net-300.pt")
    code, found = document("verify", three, "--step", 300, "--wait", 0)
    assert (code, found["outcome"]) == (4, "pending")


def test_hostile_names_are_escaped(invoke, root):
    """Control characters and right-to-left marks in file names never reach the terminal; JSON keeps them exact."""
    name = "net\u202e\x1b[31m-5.pt"
    write_torch(root, 5, seed=5)
    (root / "net-5.pt").rename(root / name)
    shown = invoke("verify", root)
    assert "\x1b" not in shown.stdout
    assert "\u202e" not in shown.stdout
    assert "\\u202e" in shown.stdout
    as_json = invoke("verify", root, "--json")
    assert as_json.stdout.isascii()
    assert "\x1b" not in as_json.stdout


def test_data_and_trouble_have_streams_of_their_own(process, three):
    """As a process: one document on stdout, also of an error, and nothing on stderr when all is well."""
    good = process("verify", three, "--json")
    assert good.returncode == 0
    assert good.stderr == ""
    shutil.rmtree(three)
    gone = process("verify", three, "--json")
    assert gone.returncode == 10
    assert json.loads(gone.stdout)["error"]["kind"] == "not_found"
    assert "Traceback" not in gone.stderr


@pytest.mark.parametrize(
    "damage", [b"", b"PK", b"\x80\x02.", b"\x00" * 4096, b'{"a": ' * 2000, b"\xff" * 100], ids=range(6)
)
@pytest.mark.parametrize("name", ["net-1.pt", "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_rubbish_is_a_verdict(document, root, name, damage):
    """Bytes that are no checkpoint end in a verdict that is not good, never in a traceback."""
    (root / name).write_bytes(damage)
    code, found = document("verify", root / name)
    assert code in (3, 4)
    assert found["outcome"] != "good"


def test_what_cannot_be_read_is_could_not_tell(document, invoke, three, monkeypatch):
    """An I/O error is no verdict: pending in the document, and 1, for nothing bad was found; damage still wins."""
    real = checkpoint_module.verify_checkpoint

    def failing(run, checkpoint, *args, **kwargs):
        if checkpoint.step == 200:
            raise StorageError("the disk said no", key=checkpoint.path)
        return real(run, checkpoint, *args, **kwargs)

    monkeypatch.setattr(checkpoint_module, "verify_checkpoint", failing)
    code, found = document("verify", three)
    assert (code, found["outcome"]) == (1, "pending")
    (three / "net-300.pt").write_bytes(b"rubbish")
    assert document("verify", three)[0] == 3


def test_a_run_without_write_access_is_answered_with_a_warning(invoke, three, monkeypatch):
    """Verdicts that cannot be recorded are still told; stderr says what was not possible."""

    def denied(run, verdict, **how):
        raise DeniedError("read-only", key="ledger")

    monkeypatch.setattr(ckptguard.runs.history, "append_verdict", denied)
    result = invoke("verify", three)
    assert result.exit_code == 0
    assert "3 good" in result.stdout
    assert result.stderr.startswith("warning: ")


def test_allowed_tensors_may_hold_what_is_not_finite(document, invoke, root):
    """--allow-nonfinite PATTERN makes it good, and the run remembers the pattern."""
    state = state_dict(1)
    state["embed.weight"][0, 0] = float("inf")
    torch.save(state, root / "net-100.pt")
    assert document("verify", root)[0] == 3
    assert document("verify", root, "--allow-nonfinite", "embed.*")[0] == 0
    assert document("verify", root)[0] == 0


def test_a_stray_pickle_names_only_what_is_trusted(document, tmp_path, root):
    """A name outside the allow-list is bad in a stray file, until --trust-global accepts it."""
    path = tmp_path / "stray.pt"
    torch.save({"weight": torch.ones(2), "part": fractions.Fraction(1, 3)}, path)
    code, found = document("verify", path)
    assert code == 3
    assert any("fractions.Fraction" in f["message"] for f in found["checkpoints"][0]["findings"])
    assert document("verify", path, "--trust-global", "fractions.Fraction")[0] == 0


def test_a_full_disk_hides_no_verdict(three, invoke, flip):
    """Where verdicts cannot be recorded for want of space, they are still given, with one warning."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    corrupt = three / "net-200.pt"
    corrupt.write_bytes(corrupt.read_bytes()[:-100])
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # EFBIG is handled as ENOSPC is
    try:
        result = invoke("verify", three)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 3
    assert [line.split()[0] for line in result.stdout.splitlines() if "net-" in line and ".pt  " in line] == [
        "good",
        "bad",
        "good",
    ]
    assert result.stderr.count("could not be recorded") == 1


def test_a_file_of_no_known_format_is_not_called_good(root, invoke):
    """Nobody can tell, unless somebody states what its bytes must be."""
    notes = root / "notes.txt"
    notes.write_text("hello")
    result = invoke("verify", notes)
    assert (result.exit_code, result.stdout.split()[0]) == (1, "pending")
    sums = root / "SHA256SUMS"
    sums.write_text(f"{hashlib.sha256(b'hello').hexdigest()}  notes.txt\n")
    assert invoke("verify", notes, "--check-sums", sums).exit_code == 0
