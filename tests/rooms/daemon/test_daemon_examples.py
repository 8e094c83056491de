"""The files that the daemon prints to be edited: systemd units, a container file, settings."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ckptguard_daemon.__main__ import command
from ckptguard_daemon.liveness import LONGEST_SILENCE
from click.testing import CliRunner

from ckptguard.runs.settings_file import load_settings

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def printed(name: str) -> str:
    """What `--example` prints, without a run being named."""
    answer = CliRunner().invoke(command, ["--example", name])
    assert answer.exit_code == 0
    return answer.output


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
    assert load_settings(str(path), {}) == load_settings(None, {})


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


def test_the_container_file_is_sound() -> None:
    """It installs the wheel that lies beside it, with extras that there are, and runs a command that there is."""
    lines = [line for line in printed("container").splitlines() if line and not line.startswith("#")]
    words = {line.split()[0] for line in lines}
    assert words == {"FROM", "ARG", "COPY", "RUN", "ENV", "ENTRYPOINT"}
    assert re.fullmatch(r"FROM \S+/python:3\.1[123]-slim", lines[0])
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
