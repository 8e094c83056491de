"""A machine with few descriptors, little memory or no more threads: "could not tell", said, and never a verdict."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.tiny_files import CONFIG

from ckptguard.errors import CouldNotTellError
from ckptguard.scan import scan_files
from ckptguard.scan.options import ScanOptions
from ckptguard.storage import open_storage
from ckptguard.storage.failures import machine_trouble

SHARDS = 40
BLOCK = 4 << 20  # larger files are read side by side


@pytest.fixture
def sharded(root):
    """A run with a checkpoint of forty shards."""
    folder = root / "model-100"
    folder.mkdir()
    shards = {}
    for number in range(1, SHARDS + 1):
        name = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        write(folder / name, f"w{number}", 100)
        shards[f"w{number}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (folder / CONFIG).write_text("{}")
    return root


def write(path, name, length):
    """A safetensors file with one tensor."""
    weights = np.random.default_rng(length).standard_normal(length).astype("<f4")
    header = json.dumps({name: {"dtype": "F32", "shape": [length], "data_offsets": [0, weights.nbytes]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + weights.tobytes())


def run_with(limits, *command):
    """A command under limits of the system: its exit code and all that it said."""

    def limit():
        for what, most in limits.items():
            resource.setrlimit(what, (most, most))

    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        preexec_fn=limit,
        env={**os.environ, "CKPTGUARD_SETTLE": "0"},
    )
    return done.returncode, done.stdout + done.stderr


def test_few_descriptors_are_enough_for_many_shards(sharded):
    """All doors read, keep and put back forty files with twenty-four descriptors."""
    few = {resource.RLIMIT_NOFILE: 24}
    code, said = run_with(few, "ckptguard_daemon", sharded, "--once")
    assert (code, "could_not_tell" in said) == (0, False), said
    for words in (("verify",), ("scrub",), ("known-good", "--read"), ("list",), ("rollback", "--dry-run")):
        code, said = run_with(few, "ckptguard", words[0], sharded, *words[1:])
        assert (code, "too many" in said) == (0, False), said


READERS = {"command": ("ckptguard", "verify"), "daemon": ("ckptguard_daemon", "--once")}  # in threads, in a process


@pytest.mark.parametrize(("reader", "few"), [("command", 8), ("command", 10), ("daemon", 12), ("daemon", 20)])
def test_too_few_descriptors_are_said(sharded, reader, few):
    """Not all can be done, and what may have a verdict is not bad."""
    code, said = run_with({resource.RLIMIT_NOFILE: few}, *READERS[reader], sharded)
    assert code == 1
    assert "many open files" in said
    assert not any(word in said for word in ("Traceback", "bad")), said


@pytest.mark.parametrize("megabytes", [20, 30, 60, 120, 400])
@pytest.mark.parametrize("reader", READERS)
def test_little_memory_is_no_verdict(sharded, megabytes, reader):
    """It is good or could not be told, whatever else needs the memory; a limit below ours is no trouble by itself."""
    code, said = run_with({resource.RLIMIT_AS: megabytes << 20}, *READERS[reader], sharded)
    assert code in ((0,) if megabytes == 400 else (0, 1)), said
    assert not any(word in said for word in ("interrupted", "a mistake in ckptguard", "bad", "incomplete")), said
    assert said.strip()


@pytest.mark.parametrize(("before", "alone"), [("import ckptguard.cli.entry", True), ("pass", False)])
def test_numpy_starts_no_threads_in_a_command(before, alone):
    """Its library interrupts the process where they cannot be started. Whoever else uses numpy has them as ever."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("with one processor numpy starts none")
    code = f"{before}; import os, ckptguard.scan.numbers as _; print(len(os.listdir('/proc/self/task')), *os.environ)"
    clean = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean)
    threads, *variables = done.stdout.split()
    assert (threads == "1", "OPENBLAS_NUM_THREADS" in variables) == (alone, False)


@pytest.mark.parametrize("before", range(3))
def test_threads_that_cannot_be_started_are_said(tmp_path, monkeypatch, before):
    """However many could be started before: it is could not tell, and ends."""
    for name in "abcd":
        write(tmp_path / f"{name}.safetensors", "w", BLOCK // 4 + 100)
    write(tmp_path / "e.safetensors", "w", 5 * BLOCK + 1)
    started, said, start = [], [], threading.Thread.start

    def refuse(thread):
        if len(started) >= before:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    keys = sorted(path.name for path in tmp_path.iterdir())
    for chosen in (keys, keys[-1:]):
        started.clear()
        try:
            scan = scan_files(open_storage(str(tmp_path)), chosen, ScanOptions(workers=4))
        except CouldNotTellError as error:
            said.append(error.message)
        else:  # those that there are were enough
            assert before
            assert [file.entry.key for file in scan.files] == chosen
    assert set(said) == {"no more threads can be started"} if before < 2 else True


def test_what_a_machine_says_is_said_in_our_words():
    """And a mistake of ours is none of it."""
    numpys = ImportError("\n\nIMPORTANT: PLEASE READ THIS\n\nmany lines")
    lost = SystemError("error return without exception set")  # there was no memory for the error itself
    for error in (MemoryError(), lost, OSError(errno.EMFILE, "Too many open files"), numpys, OSError()):
        told = machine_trouble(error)
        assert told is not None
        assert "\n" not in told.message
    assert (
        str(machine_trouble(OSError(errno.EMFILE, "Too many open files", "/a\n"))) == "/a\\u000a: too many open files"
    )
    for error in (
        KeyError("x"),
        SystemError("bad call"),
        RuntimeError("dictionary changed size"),
        AssertionError(),
        RecursionError(),
    ):
        assert machine_trouble(error) is None
