"""sums: what `md5sum -c` reads, with the names as they are."""

import hashlib
import shutil
import subprocess

import pytest
import torch
from support.commands import on_a_terminal
from support.runs import state_dict, write_safetensors, write_torch

from ckptguard.inspect.sums import check_line
from ckptguard.verification.checksum_files import parse_check_sums

needs_md5sum = pytest.mark.skipif(shutil.which("md5sum") is None, reason="needs GNU coreutils")


def md5sum_check(text, folder):
    """Let the real md5sum check a list in a folder."""
    return subprocess.run(
        ["md5sum", "-c", "--strict", "-"], input=text, cwd=folder, capture_output=True, text=True, check=False
    )


@needs_md5sum
def test_a_single_file_is_checked_from_its_folder(verified, process):
    """The recorded sum of a file goes with the folder around it."""
    listed = process("sums", verified / "net-200.pt")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert md5sum_check(listed.stdout, verified).stdout == "net-200.pt: OK\n"


@needs_md5sum
def test_a_folder_is_checked_from_inside(root, invoke, process, monkeypatch):
    """``cd CKPT && ckptguard sums . | md5sum -c`` holds for every file of it."""
    folder = root / write_safetensors(root, 5, 5)
    assert invoke("verify", root).exit_code == 0
    monkeypatch.chdir(folder)
    listed = process("sums", ".")
    checked = md5sum_check(listed.stdout, folder)
    assert (checked.returncode, checked.stdout) == (0, "config.json: OK\nmodel.safetensors: OK\n")


@needs_md5sum
def test_sums_are_those_of_the_record(verified, invoke, flip):
    """After damage the list is still what was verified, so md5sum finds the damage."""
    flip(verified / "net-200.pt")
    listed = invoke("sums", verified / "net-200.pt")
    assert listed.exit_code == 0
    assert "net-200.pt: FAILED" in md5sum_check(listed.stdout, verified).stdout


def test_sums_of_a_stray_checkpoint_are_computed(document, root, tmp_path):
    """Without a record the bytes are read now, and the document says so."""
    path = tmp_path / write_torch(tmp_path, 7, 7)
    code, found = document("sums", path)
    assert (code, found["recorded"], found["id"], found["folder"]) == (0, False, None, str(tmp_path))
    expected = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    assert found["files"] == [{"path": "net-7.pt", "size": path.stat().st_size, "md5": expected}]


def test_a_run_has_no_sums(invoke, verified):
    """A run is many checkpoints."""
    assert invoke("sums", verified).exit_code == 10


@needs_md5sum
@pytest.mark.parametrize(
    "name", ["a b", "back\\slash", "new\nline", "return\r", "\\n", "uml\u00e4ut", " *star", "bell\a"]
)
def test_md5sum_understands_every_name(process, root, name):
    """Names with backslashes and line ends are escaped as md5sum does it; all others stand as they are."""
    folder = root / "model-5"
    folder.mkdir()
    torch.save(state_dict(1), folder / "pytorch_model.bin")
    (folder / name).write_bytes(b"something")
    listed = process("sums", folder)
    assert listed.returncode == 0
    checked = md5sum_check(listed.stdout, folder)
    assert (checked.returncode, checked.stdout.count(": OK")) == (0, 2), checked


def test_a_terminal_gets_no_control_characters(root):
    """A name from a file cannot speak to the terminal."""
    folder = root / "model-5"
    folder.mkdir()
    torch.save(state_dict(1), folder / "pytorch_model.bin")
    (folder / "red\x1b[31m").write_bytes(b"x")
    code, _, shown = on_a_terminal(["sums", folder], stdout=True)
    assert code == 0
    assert "red\x1b" not in shown
    assert "red\\u001b[31m" in shown


def test_lists_can_be_read_back():
    """Our own reader of checksum files takes a plain line."""
    digest = "d" * 32
    assert parse_check_sums(check_line(digest, "a/b.bin") + "\n", "list") == {"a/b.bin": {"md5": digest}}


def test_one_list_that_contradicts_itself_is_told(root, invoke):
    """The stronger sum decides about the file. A weaker one that is wrong beside it is a wrong line."""
    write_torch(root, 1, seed=1)
    data = (root / "net-1.pt").read_bytes()
    md5, sha256 = (hashlib.new(name, data).hexdigest() for name in ("md5", "sha256"))
    stated = root / "SHA256SUMS"
    stated.write_text(f"{sha256}  net-1.pt\n{'0' * 32}  net-1.pt\n")
    done = invoke("verify", root / "net-1.pt")
    assert done.exit_code == 0
    assert "md5 is not the one that SHA256SUMS states, but sha256 is: SHA256SUMS contradicts itself" in done.stdout
    stated.write_text(f"{sha256}  net-1.pt\n{md5}  ../run/net-1.pt\n")
    done = invoke("verify", root / "net-1.pt")
    assert (done.exit_code, "warning" in done.stdout) == (0, False)
    stated.write_text(f"{'0' * 64}  net-1.pt\n{md5}  net-1.pt\n")
    assert invoke("verify", root / "net-1.pt").exit_code == 3
