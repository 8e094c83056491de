"""The release before this one, built as a wheel from the history, and processes of both."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import Any, Self

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMIT, VERSION = "3665956bb", "0.1.0"  # the release before this one
PATIENCE = 300.0  # only what hangs takes longer


def install_release_before(folder: Path) -> Path:
    """Build the release before this one, and unpack its wheel into a folder of its own. Skips where there is no
    history."""
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history does not reach back to the release before ({COMMIT})")
    pytest.importorskip("hatchling")
    source, place = folder / "source", folder / "installed"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as members:
        members.extractall(source, filter="data")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("HATCH_", "COVERAGE"))}
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=source, env=kept, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        archive_of_wheel.extractall(place)
    return place


def environment(installed: Path | None, **further: str) -> dict[str, str]:
    """The environment of a process that imports the release in this folder, or ours."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("CKPTGUARD_", "PYTHONPATH"))}
    path = str(installed) if installed else f"{ROOT}{os.pathsep}{ROOT / 'daemon'}"
    quick = {"CKPTGUARD_SETTLE": "0", "CKPTGUARD_EXECUTOR": "inline"}
    return {**kept, **quick, "PYTHONPATH": path, **further}


class Side:
    """A process with one release (`support/release_side.py`). `call` waits for its answer."""

    def __init__(self, folder: Path, installed: Path | None, **further: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.installed = folder, installed
        self.version = VERSION if installed else "this"
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("release_side.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=environment(installed, XDG_RUNTIME_DIR=str(folder), **further),
            text=True,
        )
        home = str(installed or ROOT)
        said = self.call("about")
        assert said["file"].startswith(home), said
        assert (said["version"] == VERSION) == (installed is not None), said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate(timeout=PATIENCE)  # which closes its stdin: it ends

    def call(self, name: str, *arguments: Any) -> Any:
        """What the function of this name answers."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([name, *arguments]) + "\n")
        stdin.flush()
        watch = threading.Timer(PATIENCE, self._process.kill)
        watch.start()
        line = stdout.readline()
        watch.cancel()
        assert line, f"{name} {arguments} ended the process with {self._process.wait()}"
        return json.loads(line)

    def cli(self, *words: str | Path) -> tuple[int, str]:
        """(exit code, everything printed) of a command."""
        done = self.call("cli", *map(str, words))
        assert "Traceback" not in done["err"], done["err"]
        return done["code"], done["out"] + done["err"]

    def document(self, *words: str | Path) -> tuple[int, Any]:
        """(exit code, document) of a command."""
        done = self.call("cli", *map(str, words), "--json")
        assert done["out"], (words, done)
        return done["code"], json.loads(done["out"])

    def once(self, run: Path) -> int:
        """The exit code of one pass of this release's daemon over a run."""
        command = [sys.executable, "-m", "ckptguard_daemon", str(run), "--once"]
        folder = str(self.folder)
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(self.installed, XDG_RUNTIME_DIR=folder),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode
