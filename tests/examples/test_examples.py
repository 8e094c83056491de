"""The examples run as their readers would run them."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.faults import flip
from support.forked import HUGGING_FACE, Forked
from support.hub_caches import Hub, sharded_files
from support.runs import write_sharded

from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name, *arguments, cwd):
    """Run an example as a process of its own, without this machine's settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTGUARD_")}
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**environment, "CKPTGUARD_SETTLE": "0", "OMP_NUM_THREADS": "1"},
        cwd=cwd,
    )


def run_trainer(run, *options):
    """Run an example that trains with the Trainer, which a Python has imported before: exit code, stdout, stderr."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTGUARD_")}
    place = EXAMPLES / "hf_trainer.py"
    process = Forked(
        place.read_text(encoding="utf-8"),
        *options,
        run,
        name=str(place),
        environment={**environment, "CKPTGUARD_SETTLE": "0", "OMP_NUM_THREADS": "1"},
        cwd=run.parent,
        imported=HUGGING_FACE,
    )
    out, err = process.communicate(110)
    return process.returncode, out, err


@pytest.fixture
def download(tmp_path):
    """A folder as a model hub would leave it, with its checksums; the files are old enough to count as quiet."""
    folder = tmp_path / write_sharded(tmp_path, 1, seed=1)
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(lines))
    for path in folder.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return folder


def test_a_good_download_is_good(download, tmp_path):
    """All sums match and nothing is wrong: exit 0, and the folder is as it was."""
    before = sorted(os.listdir(download))
    done = run_example("check_download.py", download, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "good" in done.stdout
    assert sorted(os.listdir(download)) == before


def test_a_download_with_a_wrong_byte_is_bad(download, tmp_path):
    """One changed byte in a shard: exit 3, and the shard is named."""
    shard = sorted(download.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    os.utime(shard, (1_700_000_000, 1_700_000_000))
    done = run_example("check_download.py", download, cwd=tmp_path)
    assert done.returncode == 3
    assert shard.name in done.stdout


def test_a_download_that_would_run_code_is_bad(tmp_path):
    """A pickle that calls something is BAD and is not run."""

    class Armed:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"weight": torch.ones(2), "extra": Armed()}, folder / "pytorch_model.bin")
    os.utime(folder / "pytorch_model.bin", (1_700_000_000, 1_700_000_000))
    done = run_example("check_download.py", folder, cwd=tmp_path)
    assert done.returncode == 3
    assert not (tmp_path / "ran").exists()


def test_a_download_that_is_not_there_is_one_sentence(tmp_path):
    """No traceback for a wrong path."""
    done = run_example("check_download.py", tmp_path / "absent", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_checking_nothing_is_one_sentence(tmp_path):
    """Without a folder: how it is used, and no traceback."""
    done = run_example("check_download.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("usage: ")


def test_a_download_in_a_hub_cache_needs_no_checksum_file(tmp_path):
    """Its blobs' names are the digests: good, then bad by one bit, then incomplete without a shard."""
    snapshot = Hub(tmp_path / "hub").download(sharded_files())
    shard = snapshot / "model-00002-of-00003.safetensors"
    assert run_example("check_download.py", snapshot, cwd=tmp_path).returncode == 0
    flip(shard.resolve())
    done = run_example("check_download.py", snapshot, cwd=tmp_path)
    assert (done.returncode, shard.name in done.stdout) == (3, True)
    shard.resolve().unlink()
    assert run_example("check_download.py", snapshot, cwd=tmp_path).returncode == 4


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py")))
def test_examples_compile(name):
    """Every example is valid Python and says in its first lines what it shows."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert compile(text, name, "exec").co_consts
    assert text.startswith('"""')


def test_the_trainer_example_stops_at_a_good_checkpoint(tmp_path):
    """Hugging Face's Trainer is stopped before the poisoned save, and what it leaves is known-good."""
    run = tmp_path / "run"
    code, out, err = run_trainer(run, "--stop")
    assert code == 0, err
    assert "Traceback" not in err
    known_good = find_known_good(open_run(str(run)))
    assert known_good.path in out
    assert known_good.step == 4
    assert not (run / "checkpoint-6").exists()


def test_the_trainer_example_goes_back(tmp_path):
    """The overflowing update is left out, training ends, and what it leaves is known-good."""
    run = tmp_path / "run"
    code, out, err = run_trainer(run)
    assert code == 0, err
    assert "trained to step 10; every weight is finite: True" in out
    assert "went back from step 6 to step 4" in err
    assert (run / "checkpoint-10").is_dir()
