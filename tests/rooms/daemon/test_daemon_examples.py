"""The files that the daemon prints to be edited: systemd units, a container file, settings."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ckptguard_daemon.command import command
from ckptguard_daemon.liveness import LONGEST_SILENCE, probe
from support.daemon_process import PATIENCE, printed, request, save, until

from ckptguard.runs.settings_file import load_settings
from ckptguard.values.ids import run_id_of

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def read_unit(name: str) -> configparser.ConfigParser:
    """A printed unit; where a name stands twice the last counts."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(printed(name))
    return unit


def test_the_settings_can_be_used_as_they_are(tmp_path: Path) -> None:
    """What is printed is a settings file that the daemon takes."""
    path = tmp_path / "ckptguard.toml"
    path.write_text(printed("settings"), encoding="utf-8")
    assert load_settings(str(path), {}, []) == load_settings(None, {}, [])


def test_the_unit_starts_the_daemon() -> None:
    """Its command line is one that the daemon takes, it names no file that need not be there, and wrong settings do
    not have it started again and again."""
    unit = read_unit("service")
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "ckptguard-daemon"
    parsed = command.make_context("ckptguard-daemon", arguments).params
    assert parsed["runs"] == ("%h/runs/exp1",)
    assert parsed["config"] is None
    assert unit["Service"]["RestartPreventExitStatus"] == "2"
    assert unit["Install"]["WantedBy"] == "default.target"


def test_the_unit_for_the_machine_names_its_user_everywhere() -> None:
    """Its command line is one that the daemon takes. What it watches may be written, the settings are a credential, the
    socket lies in the folder that systemd makes, and a reload is what the daemon takes for one."""
    service = read_unit("template")["Service"]
    parsed = command.make_context("ckptguard-daemon", shlex.split(service["ExecStart"])[1:]).params
    assert parsed["fleet"] == service["ReadWritePaths"] == "/srv/runs/%i"
    name, _, place = service["LoadCredential"].partition(":")
    assert (parsed["config"], place) == (f"%d/{name}", "/etc/ckptguard/%i.toml")
    assert parsed["socket_path"] == f"%t/{service['RuntimeDirectory']}/daemon.sock"
    assert (service["User"], service["RestartPreventExitStatus"]) == ("%i", "2")
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_the_unit_names_the_program_that_printed_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a virtual environment, whatever its path: systemd would read a bare % and split at a space."""
    place = tmp_path / "my env 100%"
    place.mkdir()
    (place / "ckptguard-daemon").touch()
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    assert f'ExecStart="{tmp_path}/my env 100%%/ckptguard-daemon" ' in printed("service")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("name", ["service", "template"])
def test_systemd_takes_the_unit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd's own check finds nothing. An instance is named after its user."""
    (tmp_path / "ckptguard-daemon").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    unit = tmp_path / ("ckptguard-daemon.service" if name == "service" else "ckptguard-daemon@daemon.service")
    unit.write_text(printed(name), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_unit_for_the_machine_is_exposed_little(tmp_path: Path) -> None:
    """systemd's rating of what the service may do is 4.0 or less, of at most 10."""
    unit = tmp_path / "ckptguard-daemon@daemon.service"
    unit.write_text(printed("template"), encoding="utf-8")
    rating = ["systemd-analyze", "security", "--offline=true", "--threshold=40", "--no-pager", str(unit)]
    done = subprocess.run(rating, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_the_units_wait_as_long_as_the_daemon_may_be_silent() -> None:
    """What the watchdog takes for a hang is what the probes take for one."""
    for name in ("service", "template"):
        unit = read_unit(name)
        assert unit["Service"]["Type"] == "notify"
        assert unit["Service"]["WatchdogSec"] == f"{LONGEST_SILENCE / 60:g}min"


@pytest.mark.parametrize("name", ["service", "template"])
def test_the_units_have_limits(name: str) -> None:
    """A process that is ended for its memory does not end the daemon: its checkpoint is tried again."""
    service = read_unit(name)["Service"]
    assert {"MemoryMax", "TasksMax"} <= service.keys()
    assert service["OOMPolicy"] == "continue"


def test_the_container_file_is_sound() -> None:
    """It installs the wheel that lies beside it, with extras that there are, and runs a command that there is."""
    lines = [line for line in printed("container").splitlines() if line and not line.startswith("#")]
    words = {line.split()[0] for line in lines}
    assert words == {"FROM", "ARG", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT"}
    assert re.fullmatch(r"ARG BASE=\S+/python:3\.1[123]-slim", lines[0])
    assert lines[1] == "FROM ${BASE}"
    assert "USER 1000:1000" in lines
    assert lines[-1] == 'ENTRYPOINT ["ckptguard-daemon"]'
    assert "ckptguard-daemon" in SCRIPTS
    shown = re.search(r"EXTRAS=\[([a-z,0-9]+)\]", printed("container"))
    assert shown is not None
    assert set(shown[1].split(",")) <= set(EXTRAS)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint here")
def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    """The linter of container files has no remark."""
    path = tmp_path / "Containerfile"
    path.write_text(printed("container"), encoding="utf-8")
    done = subprocess.run(["hadolint", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_root_that_cannot_be_written_is_enough(run: Path, short_folder: Path) -> None:
    """As in the container: all but the run, /tmp and the socket's folder is read-only. A save gets its verdict, a probe
    its answer, and the end is clean. The socket's folder is made."""
    box = ["bwrap", "--unshare-user", "--uid", "1000", "--gid", "1000", "--ro-bind", "/", "/", "--dev", "/dev"]
    box += ["--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/run"]
    for path in {str(ROOT), sys.prefix, sys.base_prefix, *filter(os.path.isdir, sys.path)}:
        box += ["--ro-bind", path, path]
    box += ["--bind", str(run), str(run), "--bind", str(short_folder), "/run/user", "--remount-ro", "/run", "--"]
    if shutil.which("bwrap") is None or subprocess.run([*box, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no bubblewrap here, or it may not make namespaces")
    save(run, 100)
    daemon = [sys.executable, "-m", "ckptguard_daemon", "--socket", "/run/user/ckptguard/daemon.sock", str(run)]
    address = str(short_folder / "ckptguard" / "daemon.sock")
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": "/"}
    with subprocess.Popen([*box, *daemon], stderr=subprocess.PIPE, text=True, env=paths) as process:
        try:
            until(lambda: process.poll() is not None or probe(address, "/healthz") is None, "an answer")
            pid = request(address, "GET", "/healthz")[1]["pid"]
            question = f"/v1/runs/{run_id_of(str(run))}/known-good?wait_seconds=60"
            assert request(address, "GET", question)[1]["step"] == 100
            os.kill(pid, signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            print(process.communicate()[1])  # shown when the test failed
