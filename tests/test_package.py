"""The wheel and the source distribution: what is in them, what is not, and what they say of themselves."""

from __future__ import annotations

import email
import email.message
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from ckptguard.version import __version__

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[1]
INFO = f"ckptguard-{__version__}.dist-info"
DATA = {
    "ckptguard/py.typed",
    "ckptguard_daemon/deploy/Containerfile",
    "ckptguard_daemon/deploy/ckptguard-daemon.service",
    "ckptguard_daemon/deploy/ckptguard.toml",
    "ckptguard_daemon/page/index.html",
    "ckptguard_daemon/page/login.js",
    "ckptguard_daemon/page/vendor/vendored.json",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source distribution, wheel that was built from it)."""
    out = tmp_path_factory.mktemp("built")
    build(ROOT, "sdist", out)
    (source,) = out.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(out, filter="data")
    build(out / f"ckptguard-{__version__}", "wheel", out)
    (wheel,) = out.glob("*.whl")
    return source, wheel


def build(place: Path, target: str, out: Path) -> None:
    """Build as `pip` and `build` do, without an environment of its own: nothing is downloaded."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("HATCH_", "COVERAGE"))}
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)],
        cwd=place,
        env=environment,
        check=True,
        capture_output=True,
    )


def names_in(wheel: Path) -> set[str]:
    """What the wheel holds."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path) -> email.message.Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"{INFO}/METADATA"))


def test_the_wheel_holds_the_two_packages_whole(built: tuple[Path, Path]) -> None:
    """Every module and every file beside them is there, and the licence; nothing else is."""
    homes = {ROOT / "ckptguard": "ckptguard", ROOT / "daemon" / "ckptguard_daemon": "ckptguard_daemon"}
    ours = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for folder, package in homes.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    vendored = (ROOT / "daemon" / "ckptguard_daemon" / "page" / "vendor").glob("*.LICENSE")
    about |= {f"{INFO}/licenses/{path.relative_to(ROOT).as_posix()}" for path in vendored}
    assert names_in(built[1]) == ours | about
    assert ours >= DATA
    assert any(name.endswith("/report.css") for name in ours)


def test_the_source_has_what_the_tests_need_and_no_litter(built: tuple[Path, Path]) -> None:
    """Who packages ckptguard can run its tests; caches, environments and built things stay out."""
    with tarfile.open(built[0]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    tops = {name.partition("/")[0] for name in names}
    assert tops >= {"ckptguard", "daemon", "tests", "examples", "dev.py", "README.md", "LICENSE", "CHANGELOG.md"}
    litter = ("__pycache__", ".venv", "dist", "build", ".git", "demo-run")
    assert [name for name in names if set(name.split("/")) & set(litter) or name.endswith(".pyc")] == []


def test_the_wheel_says_what_it_is(built: tuple[Path, Path]) -> None:
    """Name, version, licence, readme, Pythons; no address, for there is none yet."""
    said = metadata(built[1])
    assert (said["Name"], said["Version"], said["License-Expression"]) == ("ckptguard", __version__, "Apache-2.0")
    assert said["Requires-Python"] == ">=3.11"
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload().startswith("# ckptguard")  # type: ignore[union-attr]
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        said.get_all("Classifier") or []
    )
    assert said["Keywords"]
    assert said.get_all("Project-URL") is None


def test_extras_name_packages_that_bring_no_torch(built: tuple[Path, Path]) -> None:
    """Neither the package nor what its users may ask for pulls torch in."""
    said = metadata(built[1])
    wanted = said.get_all("Requires-Dist") or []
    assert {"s3", "gcs", "azure", "sftp", "notify"} <= set(said.get_all("Provides-Extra") or [])
    assert [line for line in wanted if line.startswith("torch") and not line.startswith("torchdata")] == []


def test_entry_points_are_the_commands(built: tuple[Path, Path]) -> None:
    """The command is called as the package is, so that `uvx` and `pipx run` find it."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    with zipfile.ZipFile(built[1]) as archive:
        text = archive.read(f"{INFO}/entry_points.txt").decode()
    assert set(scripts) == {"ckptguard", "ckptguard-daemon"}
    assert [line for line in text.splitlines() if "=" in line] == [f"{name} = {at}" for name, at in scripts.items()]


def test_every_command_helps_from_the_wheel_alone(built: tuple[Path, Path]) -> None:
    """`--help` is the manual page, and the wheel has it: imported out of the archive, no file of ours is missing."""
    from ckptguard.cli.entry import COMMANDS

    tried = f"""
import sys; sys.path.insert(0, {str(built[1])!r})
from click.testing import CliRunner
from ckptguard.cli.entry import commands
from ckptguard_daemon.command import command as daemon
for words in {[[], *([name] for name in COMMANDS)]!r}:
    answer = CliRunner().invoke(commands, [*words, "--help"])
    assert answer.exit_code == 0 and "Usage:" in answer.output, (words, answer.output)
assert CliRunner().invoke(daemon, ["--help"]).exit_code == 0
import ckptguard; print(ckptguard.__file__)
"""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", tried],
        env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p and not is_ours(p))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(built[1]))


def is_ours(folder: str) -> bool:
    """Whether a folder on the path is this checkout."""
    return Path(folder).resolve() in (ROOT, ROOT / "daemon", ROOT / "tests")
