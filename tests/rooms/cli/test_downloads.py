"""verify on downloads: folders as `save_pretrained` writes them, with an index and a list of checksums."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time

import pytest
from support.faults import flip
from support.runs import write_sharded
from support.tiny_files import safetensors_head

from ckptguard.layouts.hub_snapshot import HUB_RECORDS
from ckptguard.records.run import create_record, open_run

FIRST, SECOND, THIRD = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(root):
    """A sharded model; `SHA256SUMS` beside its files, written by sha256sum itself."""
    path = root / write_sharded(root, 1, seed=1)
    names = sorted(p.name for p in path.iterdir())
    done = subprocess.run(["sha256sum", *names], cwd=path, capture_output=True, check=True)
    (path / "SHA256SUMS").write_bytes(done.stdout)
    return path


def truncate(folder):
    """One shard ends early."""
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-500])
    return {SECOND}


def remove(folder):
    """One shard is not there."""
    (folder / SECOND).unlink()
    return {SECOND}


def swap(folder):
    """Two shards under each other's names."""
    (folder / FIRST).rename(folder / "aside")
    (folder / SECOND).rename(folder / FIRST)
    (folder / "aside").rename(folder / SECOND)
    return {FIRST, SECOND}


def replace(folder):
    """One shard is a copy of another."""
    (folder / THIRD).write_bytes((folder / FIRST).read_bytes())
    return {THIRD}


def page(folder):
    """One shard is what the server said instead."""
    (folder / FIRST).write_bytes(b"<!DOCTYPE html><html>Not Found</html>")
    return {FIRST}


def pointer(folder):
    """One shard is the pointer that git leaves without LFS."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n"
    (folder / FIRST).write_text(text)
    return {FIRST}


def empty(folder):
    """One shard has no bytes."""
    (folder / FIRST).write_bytes(b"")
    return {FIRST}


def bit(folder):
    """One bit of a tensor; nothing but a digest can tell."""
    flip(folder / THIRD, -1000, new_times=True)
    return {THIRD}


DAMAGES = (truncate, remove, swap, replace, page, pointer, empty, bit)


def errors(found):
    """(check, file) of all errors."""
    findings = found["checkpoints"][0]["findings"]
    return {(f["check"], f["file"]) for f in findings if f["severity"] == "error"}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_download_is_named_by_its_checksums(document, folder, damage):
    """Exit 3, exactly the damaged files among the digests' findings."""
    assert document("verify", folder, "--check-sums", folder / "SHA256SUMS")[0] == 0
    damaged = damage(folder)
    code, found = document("verify", folder, "--check-sums", folder / "SHA256SUMS")
    assert (code, found["outcome"]) == (3, "bad")
    assert {file for check, file in errors(found) if check == "digests"} == damaged


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d is not bit], ids=lambda d: d.__name__)
def test_a_damaged_download_is_found_without_checksums(document, folder, damage):
    """Index and structures alone: not good, and the damaged files are named."""
    (folder / "SHA256SUMS").unlink()
    assert document("verify", folder)[0] == 0
    damaged = damage(folder)
    code, found = document("verify", folder)
    assert code in (3, 4)
    assert damaged <= {file for _, file in errors(found)}


@pytest.mark.parametrize("command", ["md5sum", "sha512sum --tag", "b2sum --tag", "sha256sum --zero"])
def test_lists_of_many_tools_from_many_places(document, folder, root, command):
    """Beside the files, around them, and from the root of all."""
    for place, names in (
        (folder, [FIRST, SECOND, THIRD]),
        (root, [f"{folder.name}/{n}" for n in (FIRST, SECOND, THIRD)]),
        (root, [str(folder / n) for n in (FIRST, SECOND, THIRD)]),
    ):
        sums = root / "LIST"
        sums.write_bytes(subprocess.run([*command.split(), *names], cwd=place, capture_output=True, check=True).stdout)
        assert document("verify", folder, "--check-sums", sums)[0] == 0
        assert document("verify", folder / FIRST, "--check-sums", sums)[0] == 0
    bit(folder)
    code, found = document("verify", folder, "--check-sums", sums)
    assert (code, errors(found)) == (3, {("digests", THIRD)})


def test_a_digest_alone_is_the_one_files(document, invoke, folder):
    """``model.safetensors.sha256`` with nothing but the digest in it; of a folder it says nothing."""
    alone = folder.parent / "digest.sha256"
    alone.write_text(hashlib.sha256((folder / FIRST).read_bytes()).hexdigest())
    assert document("verify", folder / FIRST, "--check-sums", alone)[0] == 0
    assert document("verify", folder / SECOND, "--check-sums", alone)[0] == 3
    assert invoke("verify", folder, "--check-sums", alone).exit_code == 2


@pytest.mark.parametrize("text", ["<html></html>", "", "0" * 128 + "  x", "d" * 32 + "  absent"])
def test_a_list_that_says_nothing_is_a_usage_error(invoke, folder, text):
    """Never good, never bad: one sentence and 2."""
    sums = folder.parent / "LIST"
    sums.write_text(text)
    result = invoke("verify", folder, "--check-sums", sums)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert invoke("verify", folder, "--check-sums", folder / "absent").exit_code == 2


def test_a_checkpoint_of_a_run_is_held_against_a_list_too(document, invoke, three):
    """By itself, or chosen by its step; all of a run at once is refused."""
    names = [f"net-{step}.pt" for step in (100, 200, 300)]
    sums = three / "MD5SUMS"
    sums.write_bytes(subprocess.run(["md5sum", *names], cwd=three, capture_output=True, check=True).stdout)
    assert invoke("verify", three).exit_code == 0
    assert document("verify", three / "net-200.pt", "--check-sums", sums)[0] == 0
    assert document("verify", three, "--step", 200, "--check-sums", sums)[0] == 0
    assert invoke("verify", three, "--check-sums", sums).exit_code == 2
    sums.write_text(sums.read_text().replace(sums.read_text().split()[2], "0" * 32))
    code, found = document("verify", three, "--step", 200, "--check-sums", sums)
    assert (code, errors(found)) == (3, {("digests", "net-200.pt")})


def _downloaded(folder):
    """A model with what `hf download --local-dir` notes beside each of its files."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(safetensors_head({"w": [25]}) + bytes(range(1, 101)))
    (folder / "config.json").write_text("{}")
    noted = folder / HUB_RECORDS
    noted.mkdir(parents=True)
    then = time.time() - 1000
    for name in ("model.safetensors", "config.json"):
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        (noted / f"{name}.metadata").write_text(f"{'0' * 40}\n{digest}\n{then}\n")
        for path in (folder / name, noted / f"{name}.metadata"):
            os.utime(path, (then, then))


def _tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_downloads_is_no_run(document, tmp_path):
    """Each of them is verified, and nothing is written; a damaged one is to be downloaded again."""
    for name in ("bert", "gpt2", "sub/llama"):
        _downloaded(tmp_path / "models" / name)
    before = _tree(tmp_path)
    code, found = document("verify", tmp_path / "models")
    assert (code, found["outcome"], found["what_now"]) == (0, "good", [])
    assert {c["path"] for c in found["checkpoints"]} == {"bert", "gpt2", "sub/llama"}
    assert _tree(tmp_path) == before
    weights = tmp_path / "models" / "gpt2" / "model.safetensors"
    was = os.stat(weights)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    os.utime(weights, ns=(was.st_atime_ns, was.st_mtime_ns))
    before = _tree(tmp_path)
    code, found = document("verify", tmp_path / "models")
    assert (code, found["outcome"]) == (3, "bad")
    assert found["what_now"][0].startswith("download gpt2/model.safetensors again")
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("what", ["a step", "its own save", "saved over", "records", "a loose file"])
def test_a_training_stays_a_run(document, tmp_path, what):
    """Whatever it was begun with: one save of its own is enough, and so are its records."""
    run = tmp_path / "run"
    _downloaded(run / ("checkpoint-100" if what == "a step" else "best"))
    _downloaded(run / "last")
    if what == "its own save":
        (run / "mine").mkdir()
        (run / "mine" / "model.safetensors").write_bytes((run / "best" / "model.safetensors").read_bytes())
    elif what == "saved over":
        os.utime(run / "best" / "model.safetensors", (time.time() - 500,) * 2)
    elif what == "a loose file":
        (run / "last.safetensors").write_bytes((run / "best" / "model.safetensors").read_bytes())
    elif what == "records":
        create_record(open_run(str(run)), "pins/mine", b"{}")
    document("verify", run)
    assert (run / "_ckptguard" / "ledger").is_dir()
