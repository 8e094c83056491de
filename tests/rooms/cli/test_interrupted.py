"""Ctrl-C ends a command, whatever hangs: a mount, a store, somebody who is told."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import hanging
from support.daemon_process import is_alive, save, until

IN_TIME = 60.0  # nothing here hangs for less than for ever
STORAGE = "ckptguard.storage.local.local_storage:LocalStorage"
NUMBERS = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM}
HANGS = {
    "listing": (f"{STORAGE}.list", ("verify", "RUN")),
    "reading in a thread of a pool": ("ckptguard.scan.files:scan_files", ("verify", "RUN")),
    "recording": (f"{STORAGE}.create", ("verify", "RUN")),
    "a task of a fleet": ("ckptguard.bulk.tasks:verify_one", ("fleet", "verify", "ABOVE")),
    "a search": ("ckptguard.fleet.search:RunSearch.find", ("fleet", "report", "ABOVE")),
    "known-good": (f"{STORAGE}.open", ("known-good", "RUN")),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a bad checkpoint, and no settings of this machine."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    save(folder, 100, nan=True)
    return folder


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", HANGS)
def test_a_command_that_hangs_ends(name: str, number: signal.Signals, run: Path, tmp_path: Path) -> None:
    """With the code of an interrupted command, or by the signal itself. A second try does all of it."""
    where, words = HANGS[name]
    marker = tmp_path / "hangs"
    command = [word.replace("RUN", str(run)).replace("ABOVE", str(run.parent)) for word in words]
    done = _stopped([sys.executable, hanging.__file__, where, str(marker), "ckptguard", *command], marker, number)
    assert done == NUMBERS[number]
    again = subprocess.run([sys.executable, "-m", "ckptguard", "verify", str(run)], capture_output=True, check=False)
    assert again.returncode == 3


@pytest.mark.parametrize("words", [("verify", "RUN"), ("fleet", "verify", "ABOVE")])
def test_a_hook_that_hangs_ends_with_its_command(words: tuple[str, ...], run: Path, tmp_path: Path) -> None:
    """It is not left running."""
    note = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(1000)"
    (tmp_path / "settings.toml").write_text(f"on_incident = {json.dumps([sys.executable, '-c', code])}\n")
    command = [word.replace("RUN", str(run)).replace("ABOVE", str(run.parent)) for word in words]
    command += ["--config", str(tmp_path / "settings.toml")]
    assert _stopped([sys.executable, "-m", "ckptguard", *command], note, signal.SIGINT) == 130
    until(lambda: not is_alive(int(note.read_text())), "the end of the hook")


@pytest.mark.parametrize("words", [("verify", "RUN"), ("status", "RUN"), ("doctor", "RUN")])
def test_a_store_that_takes_connections_and_never_answers(words: tuple[str, ...], run: Path, tmp_path: Path) -> None:
    """The library that waits for it is not waited for."""
    pytest.importorskip("s3fs")
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as taken:
        options = {"endpoint_url": f"http://127.0.0.1:{server.getsockname()[1]}", "key": "k", "secret": "s"}
        environment = {**os.environ, "CKPTGUARD_STORAGE": json.dumps({"s3": options})}
        command = [sys.executable, "-m", "ckptguard", *(word.replace("RUN", "s3://bucket/run") for word in words)]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                server.settimeout(120.0)
                taken.enter_context(server.accept()[0])
                process.send_signal(signal.SIGINT)
                assert process.wait(IN_TIME) == 130
            finally:
                process.kill()


# As a program that pip installs: its n-th import from then on is interrupted, and how many there were is in a file.
STARTS = """
import os, signal, sys
module, left, note = sys.argv[1], int(sys.argv[2]), sys.argv[3]
main = getattr(__import__(module, fromlist=["main"]), "main")
seen = 0
class Moments:
    def find_spec(self, *_):
        global seen
        seen += 1
        if seen == left:
            os.kill(os.getpid(), signal.SIGINT)
        with open(note, "w") as file:
            file.write(str(seen))
sys.meta_path.insert(0, Moments())
del sys.argv[1:4]
main()
"""


@pytest.mark.parametrize(
    ("module", "words"), [("ckptguard_daemon.__main__", ("--once", "RUN")), ("ckptguard.cli", ("verify", "RUN"))]
)
def test_an_interruption_while_a_program_is_imported(
    module: str, words: tuple[str, ...], run: Path, tmp_path: Path
) -> None:
    """Whatever is being imported: it ends with 130, and says nothing or one line."""
    save(run, 200)
    note = tmp_path / "seen"

    def start(left: int) -> tuple[int, str]:
        command = [sys.executable, "-c", STARTS, module, str(left), str(note)]
        command += [word.replace("RUN", str(run)) for word in words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IN_TIME, check=False)
        return done.returncode, done.stderr

    assert start(0)[0] == 3
    moments = random.Random(module).sample(range(2, int(note.read_text()) // 2), 14)
    ends = {moment: start(moment) for moment in (1, *moments)}
    assert {moment: end for moment, end in ends.items() if end[0] != 130 or "\n" in end[1].strip()} == {}


def _stopped(command: list[str], began: Path, number: int) -> int:
    """Start a command, and stop it when this file is there. Returns its exit code."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: began.exists() and (began.name != "pid" or began.read_text()), "something that hangs")
            process.send_signal(number)
            return process.wait(IN_TIME)
        finally:
            process.kill()


SUPERVISE = {
    "before the first start": ("ckptguard.supervise.save_watch:SaveWatch.prepare", 143),
    "between two starts": ("ckptguard.supervise.save_watch:SaveWatch.begin", 143),
    "after the command ended well": ("ckptguard.supervise.save_watch:SaveWatch.sick#2", 0),
}


@pytest.mark.parametrize("name", SUPERVISE)
def test_supervise_is_not_held_up_by_its_own_work(name: str, run: Path, tmp_path: Path) -> None:
    """One SIGTERM ends it: with the command's own code if that was asked to end, too."""
    where, code = SUPERVISE[name]
    marker, started = tmp_path / "hangs", tmp_path / "started"
    train = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        "time.sleep(1000)"
    )
    program = [sys.executable, hanging.__file__, where, str(marker), "ckptguard"]
    command = [*program, "supervise", "--max-rollbacks", "0", str(tmp_path / "new"), "--", sys.executable, "-c", train]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            until((marker if code else started).exists, "something that hangs, or the command")
            process.terminate()
            assert process.wait(IN_TIME) == code
        finally:
            process.kill()
    assert marker.exists()
